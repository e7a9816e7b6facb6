"""Events of users: from files, and drawn with planted interests."""

from rooftile.recommend.data.clicks import Clicks, planted_clicks
from rooftile.recommend.data.events import Events, packed, without_last
from rooftile.recommend.data.files import read_events
from rooftile.recommend.data.planted import Planted, planted_events

__all__ = ["Clicks", "Events", "Planted", "packed", "planted_clicks", "planted_events", "read_events", "without_last"]
