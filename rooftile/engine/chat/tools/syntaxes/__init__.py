"""The syntaxes of calls, each with its reader and its grammar.

hermes         an object in a pair of tags; listed, mistral and cohere have lists of objects, llama_json bare ones
sectioned      calls between tokens: deepseek, kimi
tagged         arguments in tags: qwen_xml, glm, minimax
pythonic       calls of Python; python_values reads its literals, python_rules writes their grammar
gemma          values between tokens of their own; literal_rules has what the two grammars have in common
"""
