"""The routes of a model that embeds and scores texts.

forms      the fields that each route takes
input      texts out of these fields
call       one request: tokens, its place in the queue, the engine, vectors
answers    vectors and scores in the forms of OpenAI, Jina, Cohere and vLLM
routes     what the paths do
"""
