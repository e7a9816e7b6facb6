"""OpenAI's /v1/responses, as a translation to chats and back.

forms      the fields of a request
functions  functions and namespaces of functions, and the names of calls
items      items of the input as messages of a chat
output     a chat's answer as items and typed events
store      answers that are kept for `previous_response_id`, in bounded memory
call       one call: from its body to the chat, and from the chat to the answer
"""
