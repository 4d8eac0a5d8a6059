"""``office``: a productivity co-pilot with mail, calendar, drive and chat, in which some actions must not be taken."""
