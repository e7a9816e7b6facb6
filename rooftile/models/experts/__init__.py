"""Feed-forwards with experts in a decoder.

sizes         what `ModelConfig` knows of them
families      config.json of Mixtral, Qwen 3 MoE, OLMoE, DeepSeekMoE and gpt-oss
feed_forward  the router, the experts, and the network that all tokens share
"""
