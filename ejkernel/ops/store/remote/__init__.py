"""The remote tier: entries that the machines of a team share, in a bucket, over SSH, on a web server or in a folder."""
