"""Chooses how a model writes calls, by the text of its chat template or by a name."""

from __future__ import annotations

from rooftile.engine.chat.harmony.form import HarmonyForm
from rooftile.engine.chat.harmony.reader import HarmonyReader
from rooftile.engine.chat.tools.syntax import Syntax
from rooftile.engine.chat.tools.syntaxes.cohere import CohereForm, CohereReader
from rooftile.engine.chat.tools.syntaxes.deepseek import CALLS, DeepseekForm, DeepseekReader
from rooftile.engine.chat.tools.syntaxes.gemma import BEGIN, GemmaForm, GemmaReader
from rooftile.engine.chat.tools.syntaxes.glm import GlmForm, GlmReader
from rooftile.engine.chat.tools.syntaxes.hermes import HermesForm, HermesReader
from rooftile.engine.chat.tools.syntaxes.kimi import SECTION, KimiForm, KimiReader
from rooftile.engine.chat.tools.syntaxes.listed import GraniteForm, GraniteReader, PhiForm, PhiReader
from rooftile.engine.chat.tools.syntaxes.llama_json import LlamaJsonForm, LlamaJsonReader
from rooftile.engine.chat.tools.syntaxes.minimax import MiniMaxForm, MiniMaxM1Form, MiniMaxM1Reader, MiniMaxReader
from rooftile.engine.chat.tools.syntaxes.mistral import MistralListForm, MistralNamedForm, MistralReader
from rooftile.engine.chat.tools.syntaxes.pythonic import PythonicForm, PythonicReader
from rooftile.engine.chat.tools.syntaxes.qwen_xml import QwenXmlForm, QwenXmlReader
from rooftile.engine.text.harmony_messages import SIGN
from rooftile.errors import InvalidInput

AUTO, NONE = "auto", "none"
PYTHONIC_SIGNS = ("<|tool_call_start|>", "[func_name1(", "<|python_start|>")


def _plain(template: str) -> str:
    """Returns a template in which the escapes of its texts are written out."""
    return template.replace("\\n", "\n").replace("\\", "")


def _shows_objects(template: str) -> bool:
    """Tells whether calls are objects with a name: others write tags of their own into the same pair of tags."""
    return '{"name": ' in _plain(template) and not any(tag in template for tag in ("<function=", "<arg_key>", "<tool_calls>"))


# in this order: the first that fits a template counts, or of one name the first that fits, else the last
_ALL = (
    Syntax("harmony", HarmonyReader, lambda template: SIGN in template, HarmonyForm(), ("openai",)),
    Syntax("mistral", MistralReader, lambda template: "[CALL_ID]" in template, MistralNamedForm(has_ids=True)),
    Syntax("mistral", MistralReader, lambda template: "[ARGS]" in template, MistralNamedForm()),
    Syntax("mistral", MistralReader, lambda template: "[TOOL_CALLS]" in template, MistralListForm()),
    Syntax("hermes", HermesReader, lambda template: "<tool_call>" in template and _shows_objects(template), HermesForm()),
    Syntax("granite", GraniteReader, lambda template: "<|tool_call|> followed by a JSON list" in template, GraniteForm()),
    Syntax("phi4_mini_json", PhiReader, lambda template: "functools[" in template, PhiForm()),
    Syntax("deepseek_v3", DeepseekReader, lambda template: CALLS in template and "```" in template, DeepseekForm(fenced=True)),
    Syntax("gemma4", GemmaReader, lambda template: f"{BEGIN}call:" in template, GemmaForm()),
    Syntax("kimi_k2", KimiReader, lambda template: SECTION in template, KimiForm()),
    Syntax("minimax_m2", MiniMaxReader, lambda template: "<minimax:tool_call>" in template, MiniMaxForm()),
    Syntax("minimax", MiniMaxM1Reader, lambda template: "<tool_calls>\n{" in _plain(template), MiniMaxM1Form()),
    Syntax(
        "cohere_command3", CohereReader, lambda template: "<|START_ACTION|>" in template, CohereForm(), ("cohere_command4",)
    ),
    Syntax("deepseek_v31", DeepseekReader, lambda template: CALLS in template, DeepseekForm(fenced=False)),
    Syntax(
        "qwen3_coder", QwenXmlReader, lambda template: "<tool_call>\n<function=" in _plain(template), QwenXmlForm(),
        ("qwen3_xml",),
    ),
    Syntax("glm45", GlmReader, lambda template: "<tool_call>" in template and "<arg_key>" in template, GlmForm(), ("glm47",)),
    Syntax(
        "pythonic", PythonicReader, lambda template: any(sign in template for sign in PYTHONIC_SIGNS), PythonicForm(),
        ("llama4_pythonic",),
    ),
    Syntax(
        "llama3_json", LlamaJsonReader, lambda template: '"name": function name, "parameters"' in template, LlamaJsonForm(),
        ("llama4_json",),
    ),
)  # fmt: skip
NAMES = {name: each for each in _ALL for name in (each.name, *each.others)}


def why_no_syntax(name: str) -> str:
    """Returns why there are no calls for a request with tools, as a sentence."""
    if name == NONE:
        return "tools are given, and tool_call_parser is none, so that no calls are read; leave tools out"
    return f"tools are given, and how this model writes calls is not known; start it with tool_call_parser, one of {_known()}"


def check_call_parser(setting: str, name: object) -> None:
    """Raises InvalidInput for a name that is none of a syntax, nor auto or none."""
    if not isinstance(name, str) or name not in (AUTO, NONE, *NAMES):
        raise InvalidInput(f"{setting} is {str(name)[:80]!r}; must be auto, none, or a syntax of calls: {_known()}")


def choose_syntax(template: str | None, name: str = AUTO) -> Syntax | None:
    """Returns how a model writes calls; None if it writes none, or in a way that is not known.

    Args:
        template: the chat template.
        name: a syntax, "auto" for the one that fits the template, or "none".

    Raises:
        InvalidInput: there is no syntax of this name.
    """
    check_call_parser("tool_call_parser", name)
    if name == AUTO:
        return None if template is None else next((each for each in _ALL if each.fits(template)), None)
    named = [each for each in _ALL if name in (each.name, *each.others)]
    return next((each for each in named if template is not None and each.fits(template)), named[-1] if named else None)


def _known() -> str:
    return ", ".join(dict.fromkeys(each.name for each in _ALL))
