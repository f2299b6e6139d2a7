"""/v1/responses, without state: nothing is stored, so each request brings its conversation.

`fields.py` is what it takes, `items.py` the parts of a conversation and what they are as messages
of a chat, `writer.py` the items of an answer and their events, `answer.py` the response around
them.
"""
