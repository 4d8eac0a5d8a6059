"""An inverse model: it is learned on few rows with calls, and says the calls of logs that lack them."""
