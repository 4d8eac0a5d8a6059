"""What each page shows, one module for each kind of thing that is shown."""
