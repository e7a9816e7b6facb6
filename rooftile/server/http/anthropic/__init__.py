"""Anthropic's /v1/messages, as a translation to chats and back.

forms      the fields of a request
blocks     blocks of content as messages of a chat
output     a chat's answer as blocks and typed events
call       one call: from its body to the chat, and from the chat to the answer
errors     refusals in Anthropic's form
"""
