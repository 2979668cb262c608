"""Where stores lie: folders, URLs, and the blocks of URLs that are kept on this host."""
