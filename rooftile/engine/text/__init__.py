"""Text in and out of the engine.

prompt               the prompts of a call, checked and turned into tokens
tokenizer            the tokenizer of a checkpoint folder, and its chat template
tokenizer_files      reads a tokenizer's settings from the files of that folder
detokenizer          turns tokens into text when it is read, and ends it at a stop string
border               what the end of a prompt changes in the text of its answer
stops                finds stop strings
incremental_decoder  decodes tokens into text that stays
growing              a text that only grows
"""
