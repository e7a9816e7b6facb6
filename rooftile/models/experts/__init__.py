"""Feed-forwards with experts in a decoder.

sizes         what `ModelConfig` knows of them
families      config.json of Mixtral, Qwen 3 MoE, OLMoE and DeepSeekMoE
feed_forward  the router, the experts, and the network that all tokens share
"""
