"""Events of users: from files, and drawn with planted interests."""

from rooftile.recommend.data.events import Events, packed, without_last
from rooftile.recommend.data.files import read_events
from rooftile.recommend.data.planted import Planted, planted_events

__all__ = ["Events", "Planted", "packed", "planted_events", "read_events", "without_last"]
