"""Registers attn_implementation="rooftile" once Transformers' models are imported, without importing them: that takes seconds."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from rooftile.integrations.after_import import call_after_import

_SOURCE = "transformers.modeling_utils"


def register_when_imported() -> None:
    """Registers the name now if Transformers' models are imported, else once they are."""
    if hasattr(sys.modules.get(_SOURCE), "AttentionInterface"):
        _register()
    else:
        call_after_import(_SOURCE, _register)


def _register() -> None:
    # an old release without the interface stays usable, and does not know the name
    if find_spec("transformers.masking_utils") is None:
        return
    from rooftile.integrations import transformers

    transformers.register()
