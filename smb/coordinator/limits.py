"""How much the coordinator keeps: of all clients, and of one certificate."""

SERVER_FORGOTTEN_AFTER_S = 600.0  # a dead server that holds nothing is shown this long
BUFFERS_MAX = 65_536  # each is a record in memory and in one ListBuffers reply
DELETED_ATTEMPTS_MAX = 4096  # the latest deletions, of which a creation that is asked for again is told
BUNDLE_BUFFERS_MAX = 16  # that move together: their records change in one transaction of the store
SERVERS_MAX = 1024  # each is probed, listed and sorted at every create
SESSIONS_MAX = 65_536
SESSIONS_PER_CERTIFICATE_MAX = 32_768  # so that the holder of one leaves places for others
METADATA_BYTES_MAX = 16 << 20  # of all buffers, packed: it is held in memory, and read whole at every start
