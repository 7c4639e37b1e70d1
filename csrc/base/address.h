/* address.h: converts a numeric IPv4 or IPv6 address and a port to a socket address. The engine
 * does not resolve names; its callers do. */
#ifndef SMB_ADDRESS_H
#define SMB_ADDRESS_H

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <string.h>
#include <sys/socket.h>

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
    return ntohs(address->name.any.sa_family == AF_INET ? address->name.v4.sin_port
                                                        : address->name.v6.sin6_port);
}

#endif
