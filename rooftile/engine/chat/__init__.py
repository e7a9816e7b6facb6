"""A model's answer in a chat, read from its text: content, thoughts and calls of functions.

parts      the parts of an answer, the protocol of their readers, and the answer as a whole
thought_formats   the marks around thoughts; which of them a chat template has, and where a prompt ends
thinking   the reader of thoughts
harmony    gpt-oss's format, whose reader has thoughts and calls
reading    which reader an answer gets
"""
