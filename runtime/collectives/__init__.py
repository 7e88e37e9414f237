"""Collective algorithms over point-to-point messages: schedules as data, and one engine that runs any of them."""
