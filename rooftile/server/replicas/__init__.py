"""Several engines behind one API.

engines     what a server asks of them
devices     which GPUs each replica has
prefixes    which blocks an engine has, as far as its prompts tell
replica     one engine's lives: started, and started again
replicas    all of them: routes prompts to engines
"""
