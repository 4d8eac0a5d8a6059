"""``rooms``: finding the way in a house of rooms on a ring, each with doors to the left and right, and a tunnel."""
