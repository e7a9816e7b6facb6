"""Text in and out of the engine.

    prompt             the prompts of a call, checked and turned into tokens
    tokenizer          the tokenizer of a checkpoint folder, and its chat template
    tokenizer_files    reads a tokenizer's settings from the files of that folder
    detokenizer        turns tokens into text while they arrive, and finds stop strings
"""
