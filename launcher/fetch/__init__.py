"""Files that runs read from the internet, fetched on a machine that has internet."""
