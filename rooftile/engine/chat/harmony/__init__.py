"""Harmony, the format of gpt-oss: an answer is messages, and each goes to a channel.

    <|channel|>analysis<|message|>The user asks for Kiel.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Kiel"}<|call|>

header     the marks, and who a message is for
form       how calls are written, and where in a header they begin
reader     `HarmonyReader`: thoughts, calls and content of one answer

How the chat template takes the messages of a conversation is in `rooftile.engine.text.harmony_messages`.
"""
