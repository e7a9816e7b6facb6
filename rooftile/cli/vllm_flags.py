"""The flags of `vllm serve` that concern its server, and that `rooftile serve` does not have: what happens anyway, and why.

Flags that concern the engine are keywords of vLLM's `LLM`, too, and stand in `rooftile.engine.vllm_names`.
"""

from __future__ import annotations

from rooftile.runtime.words import Refused

_TLS = "the server speaks plain HTTP; let a proxy end TLS"
_TOOLS = "tools of a request are read, and their calls by the syntax of --tool-call-parser"
_CORS = "an allowed origin may send what the server reads; --allowed-origins names the origins"
_LOG = "the log has a line per request; --json makes JSON lines, and --log-prompts adds prompts"
_HTTP = "the limits of a message are fixed; rooftile/server/limits.py lists them"
_HOST = "the server listens on one host and port"

SERVER_REFUSED = {
    "allow_credentials": Refused((False,), "cookies are not read; send a key as Authorization: Bearer KEY"),
    "allowed_headers": Refused((["*"],), _CORS),
    "allowed_methods": Refused((["*"],), _CORS),
    "api_server_count": Refused((1,), "one process answers HTTP, and another computes"),
    "chat_template_content_format": Refused(("auto", "string"), "templates get the content as text"),
    "config": Refused((), "give each setting as a flag"),
    "default_chat_template_kwargs": Refused(({},), "set them in a template of your own, and give --chat-template"),
    "disable_access_log_for_endpoints": Refused((), _LOG),
    "disable_fastapi_docs": Refused((True,), "/openapi.json describes the routes, and needs a key if there are keys"),
    "disable_frontend_multiprocessing": Refused((False,), "the engine always runs in a process of its own"),
    "disable_log_requests": Refused((), _LOG),
    "disable_uvicorn_access_log": Refused((True,), _LOG),
    "enable_auto_tool_choice": Refused((True,), _TOOLS),
    "enable_force_include_usage": Refused((False,), 'a stream has its usage with stream_options: {"include_usage": true}'),
    "enable_log_outputs": Refused((False,), _LOG),
    "enable_prompt_tokens_details": Refused((True,), "usage always has prompt_tokens_details"),
    "enable_request_id_headers": Refused((True,), "answers always have X-Request-Id"),
    "enable_server_load_tracking": Refused((False, True), "/load always says how many prompts wait or run"),
    "enable_ssl_refresh": Refused((False,), _TLS),
    "enable_tokenizer_info_endpoint": Refused((False,), "/tokenize and /detokenize are there"),
    "exclude_tools_when_tool_choice_none": Refused((False, True), _TOOLS),
    "grpc": Refused((False,), "the server speaks HTTP"),
    "h11_max_header_count": Refused((), _HTTP),
    "h11_max_incomplete_event_size": Refused((), _HTTP),
    "headless": Refused((False,), "the server answers HTTP"),
    "log_config_file": Refused((), _LOG),
    "max_log_len": Refused((), _LOG),
    "middleware": Refused(([],), "nothing but the server's own code runs in it; let a proxy do it"),
    "model": Refused((), "give it first, without a flag"),
    "prompt_adapters": Refused((), "soft prompts are not read; --adapter reads LoRA"),
    "response_role": Refused(("assistant",), "answers have the role assistant"),
    "return_tokens_as_token_ids": Refused((False,), "logprobs have each token's text and bytes"),
    "root_path": Refused((), "let the proxy take its path off"),
    "ssl_ca_certs": Refused((), _TLS),
    "ssl_cert_reqs": Refused((0,), _TLS),
    "ssl_certfile": Refused((), _TLS),
    "ssl_ciphers": Refused((), _TLS),
    "ssl_keyfile": Refused((), _TLS),
    "tool_parser_plugin": Refused(("",), _TOOLS),
    "tool_server": Refused((), _TOOLS),
    "tokens_only": Refused((False,), "a prompt may be text or token ids"),
    "trust_request_chat_template": Refused((False,), "a request brings no template; give one as --chat-template"),
    "uds": Refused((), _HOST),
    "uvicorn_log_level": Refused(("info",), _LOG),
}
