"""HSTU: attention without softmax over users' events, with learned numbers for distances and times."""
