"""A library of skills (Voyager): calls that successes have in common, under one name, verified and offered as tools."""
