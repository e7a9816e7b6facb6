"""The syntaxes of calls, each with its reader and its grammar.

JSON objects     hermes, llama_json, mistral, listed, cohere
between tokens   deepseek, kimi; both by sectioned
tags             qwen_xml, glm, minimax; all by tagged
values           pythonic; python_values and python_rules read and write them
"""
