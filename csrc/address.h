/* address.h: a numeric IPv4 or IPv6 address and a port, as a socket address, and what depends on where a peer is. Names are
 * resolved by callers of the engine. */
#ifndef SMB_ADDRESS_H
#define SMB_ADDRESS_H

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* What a socket to the same host holds of what is sent; the kernel doubles it: four chunks of 256 KiB and their headers, which the
 * server sends in one call. More goes around the cache that both ends share: without a bound loopback grows to 4 MiB, at 0.7 to 0.9
 * times the speed from 16 MiB up. Half of it measured slower, too. */
enum { SEND_BUFFER_HERE_BYTES = 544 << 10 };

struct address {
    socklen_t length;
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } name;
};

static inline bool address_parse(const char *text, uint16_t port, struct address *address)
{
    memset(address, 0, sizeof *address);
    if (inet_pton(AF_INET, text, &address->name.v4.sin_addr) == 1) {
        address->name.v4.sin_family = AF_INET;
        address->name.v4.sin_port = htons(port);
        address->length = sizeof address->name.v4;
    } else if (inet_pton(AF_INET6, text, &address->name.v6.sin6_addr) == 1) {
        address->name.v6.sin6_family = AF_INET6;
        address->name.v6.sin6_port = htons(port);
        address->length = sizeof address->name.v6;
    }
    return address->length > 0;
}

static inline uint16_t address_port(const struct address *address)
{
    return ntohs(address->name.any.sa_family == AF_INET ? address->name.v4.sin_port : address->name.v6.sin6_port);
}

/* Whether a connected socket leads to this host: both ends have one address. */
static inline bool address_is_here(int fd)
{
    struct address ours, peers;
    socklen_t ours_length = sizeof ours.name, peers_length = sizeof peers.name;
    if (getsockname(fd, &ours.name.any, &ours_length) != 0 || getpeername(fd, &peers.name.any, &peers_length) != 0 ||
        ours.name.any.sa_family != peers.name.any.sa_family || ours.name.any.sa_family == AF_UNIX)
        return false; /* a pair of Unix sockets: TLS is behind it, and any host */
    return ours.name.any.sa_family == AF_INET
               ? ours.name.v4.sin_addr.s_addr == peers.name.v4.sin_addr.s_addr
               : memcmp(&ours.name.v6.sin6_addr, &peers.name.v6.sin6_addr, sizeof ours.name.v6.sin6_addr) == 0;
}

/* Asked for more than this, the kernel would give less than we need for a few chunks, and for good. */
static inline bool address_may_have(int bytes)
{
    FILE *file = fopen("/proc/sys/net/core/wmem_max", "re");
    int most = 0;
    bool known = file && fscanf(file, "%d", &most) == 1;
    if (file)
        fclose(file);
    return known && most >= bytes;
}

enum { CONGESTION_NAME_BYTES = 16 };

/* Before a TCP socket connects within this host, or listens: nothing is to pace it. Congestion control by BBR, some systems' own, has
 * a timer between one burst and the next, at the rate that it believes in: up to half the speed on loopback, where nothing is ever
 * congested. Of a socket that began with it Linux goes on pacing when another takes its place, and one retransmission (packets that
 * two cores deliver may change places) then halves the speed for as long as it lives. Failure costs time, not correctness. */
static inline void address_unpace(int fd)
{
    setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", strlen("reno"));
}

/* The same, before it listens, with what to give those back that come from other hosts: the system's own. Empty, and nothing done,
 * where that does not pace, or may not be given back: which another socket tries. */
static inline void address_unpace_listener(int fd, char own[CONGESTION_NAME_BYTES])
{
    socklen_t room = CONGESTION_NAME_BYTES - 1;
    memset(own, 0, CONGESTION_NAME_BYTES);
    bool paces = getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, own, &room) == 0 && strncmp(own, "bbr", 3) == 0;
    int other = paces ? socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0) : -1;
    if (other >= 0)
        address_unpace(other);
    if (other >= 0 && setsockopt(other, IPPROTO_TCP, TCP_CONGESTION, own, (socklen_t)strlen(own)) == 0)
        address_unpace(fd);
    else
        own[0] = 0;
    if (other >= 0)
        close(other);
}

/* Whether a TCP connection there would lead to this host: asked of a socket that sends nothing. */
static inline bool address_leads_here(const struct address *peer)
{
    int fd = socket(peer->name.any.sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    bool here = fd >= 0 && connect(fd, &peer->name.any, peer->length) == 0 && address_is_here(fd);
    if (fd >= 0)
        close(fd);
    return here;
}

/* Of a connected TCP socket: if it leads to this host, what it holds is bounded, and it has reno if it did not begin so. Over a network
 * the system decides both, by the bandwidth and the delay that it finds. Returns how many bytes it holds, 0 where the system decides. */
static inline uint32_t address_suit_loopback(int fd)
{
    int bytes = SEND_BUFFER_HERE_BYTES, held = 0;
    socklen_t length = sizeof held;
    if (!address_is_here(fd))
        return 0;
    address_unpace(fd);
    if (!address_may_have(bytes) || setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes) != 0 ||
        getsockopt(fd, SOL_SOCKET, SO_SNDBUF, &held, &length) != 0)
        return 0;
    return (uint32_t)held;
}

#endif
