"""``service``: helping customers of a shop, who say what they are asked, under rules that are to be kept."""
