"""A model's answer in a chat, read from its text: content, thoughts and calls of functions.

parts      the parts of an answer, the protocol of their readers, and the answer as a whole
"""
