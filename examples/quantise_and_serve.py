"""Serves a small model with its weights in several formats. Run: python examples/quantise_and_serve.py"""

import tempfile
from pathlib import Path

import torch
import transformers

import rooftile as rt

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, initializer_range=0.2, pad_token_id=None))
params = rt.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
prompts = torch.randint(97, (80, 5)).tolist()

with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    due = None
    for weights in ("auto", "fp8", "int8", "w8", "int4:32", {"*.mlp.*": "int4:32", "*": "w8"}):
        llm = rt.LLM(Path(folder), weights=weights, device="cpu", num_blocks=200)
        tokens = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        due = due or tokens
        same = sum(a == b for a, b in zip(tokens, due, strict=True))
        # its weights are random, so that many tokens are nearly as likely as the first; a trained model is surer
        print(f"weights {weights}: {same} of 80 tokens as without quantisation")
