"""Performer: linear attention by random features of the softmax kernel."""
