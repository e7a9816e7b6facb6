"""The words of OpenAI's API.

forms      the fields of each route
fields     reads a form; which fields are refused, and the nearest name of an unknown one
generation turns a form into prompts and sampling parameters
prompts    the logprobs of prompts, as completions and vLLM write them
complete_answers   puts the pieces of answers together
objects    the answers in OpenAI's form
"""
