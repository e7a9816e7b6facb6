"""HTTP: everything between a socket and a request to the engine.

protocol    limits of single HTTP messages, below the application
middleware  around every request: its id, its line in the log, unforeseen errors
app         the routes
guard       who may come in: Host headers and keys
body        reads a body and parses its JSON
intake      takes requests in: their time, their bodies, their models
texts       tokenises in threads
responder   sends prompts to the engine, and waits for the answers
sse         streams answers as server-sent events
openai/     the words of OpenAI's API
responses/  its newer API, and anthropic/ Anthropic's, as translations to chats
embedding/  vectors, rankings and scores
"""
