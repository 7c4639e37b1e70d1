"""How much the coordinator keeps, in total and for one certificate."""

SERVER_FORGOTTEN_AFTER_S = 600.0  # a dead server that holds nothing is shown this long
BUFFERS_MAX = 131_072  # each is a record in memory (2 KiB), and is read at each start (50 us)
DELETED_ATTEMPTS_MAX = 4096  # the latest deletions that are remembered, so that a repeated creation is refused
DROPS_REMEMBERED_MAX = 1024  # of one server: what it drops while it is asked what it holds
BUNDLE_BUFFERS_MAX = 16  # buffers that move together: their records change in one transaction of the store
SERVERS_MAX = 1024  # each is probed, listed and sorted at every create
SESSIONS_MAX = 65_536
SESSIONS_PER_CERTIFICATE_MAX = 32_768  # so that one certificate cannot take all sessions
CALLS_MAX = 2048  # in progress at the port for all; a quarter is for operators and memory servers alone
LARGE_REQUESTS_MAX = 512  # at that port, in progress or waiting; each takes up to 2.3 MiB, so all 1.2 GiB
CALLS_WAITING_MAX = 32_768  # until they may begin; each takes 16 KiB, so all 512 MiB
FILE_ATTRIBUTES_USUAL_BYTES = 128  # rights, times and an owner, of all buffers 16 MiB; longer ones count as metadata
METADATA_BYTES_MAX = 16 << 20  # packed metadata of all buffers: it is held in memory, and read whole at each start


def has_room(own: int, free: int) -> bool:
    """Return whether a certificate that has `own` places gets one more of those that are free. Alone it gets a quarter
    of all, and the next one a quarter of the rest, so however many take what they get, some are left.
    """
    return free > 0 and 3 * own < free
