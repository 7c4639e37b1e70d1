/* A link with a delay between two network namespaces: a device far0 in each, and this process in
 * between, which keeps each packet for as long as it is on its way. For kernels without netem.
 *
 *     delay NAMESPACE NAMESPACE MICROSECONDS BITS_PER_SECOND LOST_PER_MILLION
 *
 * Each direction has a rate, and a queue in front of it of at most QUEUE_NS. Prints "ready". */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { PACKET_BYTES = 9216, PACKETS = 1 << 14, AT_ONCE = 64 };
#define QUEUE_NS 50000000U

struct packet {
    uint64_t due_ns;
    uint32_t bytes;
    uint8_t data[PACKET_BYTES];
};

struct direction {
    int from, to;
    uint64_t free_ns; /* when the last packet has left the queue */
    uint32_t first, count;
    struct packet *ring;
};

static uint64_t delay_ns, lost_per_million;
static double ns_a_byte;

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000U + (uint64_t)now.tv_nsec;
}

static int device_in(const char *namespace)
{
    char path[256];
    snprintf(path, sizeof path, "/run/netns/%s", namespace);
    int there = open(path, O_RDONLY | O_CLOEXEC);
    if (there < 0 || setns(there, CLONE_NEWNET) != 0)
        return -1;
    close(there);
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI};
    strcpy(request.ifr_name, "far0");
    return fd >= 0 && ioctl(fd, TUNSETIFF, &request) == 0 ? fd : -1;
}

/* Takes what has come, up to AT_ONCE packets. */
static void take(struct direction *way)
{
    for (int i = 0; i < AT_ONCE; i++) {
        struct packet *packet = &way->ring[(way->first + way->count) % PACKETS];
        ssize_t bytes = read(way->from, packet->data, PACKET_BYTES);
        if (bytes <= 0)
            return;
        uint64_t now = now_ns(), begins = way->free_ns > now ? way->free_ns : now;
        if (way->count + 1 == PACKETS || begins - now > QUEUE_NS ||
            (uint64_t)random() % 1000000U < lost_per_million)
            continue;
        way->free_ns = begins + (uint64_t)(ns_a_byte * (double)bytes);
        packet->due_ns = way->free_ns + delay_ns;
        packet->bytes = (uint32_t)bytes;
        way->count++;
    }
}

/* Gives what is due. Returns when the next one is, UINT64_MAX for none. */
static uint64_t give(struct direction *way)
{
    while (way->count > 0) {
        struct packet *packet = &way->ring[way->first];
        if (packet->due_ns > now_ns())
            return packet->due_ns;
        if (write(way->to, packet->data, packet->bytes) < 0 && errno == EAGAIN)
            return now_ns() + 100000U;
        way->first = (way->first + 1) % PACKETS;
        way->count--;
    }
    return UINT64_MAX;
}

int main(int count, char **given)
{
    if (count != 6) {
        fprintf(stderr,
                "delay NAMESPACE NAMESPACE MICROSECONDS BITS_PER_SECOND LOST_PER_MILLION\n");
        return 2;
    }
    delay_ns = strtoull(given[3], NULL, 10) * 1000U;
    ns_a_byte = 8e9 / strtod(given[4], NULL);
    lost_per_million = strtoull(given[5], NULL, 10);
    int ends[2] = {device_in(given[1]), device_in(given[2])};
    struct direction ways[2];
    for (int i = 0; i < 2; i++) {
        ways[i] = (struct direction){.from = ends[i], .to = ends[1 - i]};
        ways[i].ring = malloc(sizeof(struct packet) * PACKETS);
        if (ends[i] < 0 || !ways[i].ring) {
            perror("delay");
            return 1;
        }
    }
    puts("ready");
    fflush(stdout);
    for (;;) {
        uint64_t next = UINT64_MAX;
        for (int i = 0; i < 2; i++) {
            take(&ways[i]);
            uint64_t due = give(&ways[i]);
            next = due < next ? due : next;
        }
        struct pollfd polled[2] = {{.fd = ends[0], .events = POLLIN},
                                   {.fd = ends[1], .events = POLLIN}};
        uint64_t now = now_ns(), left = next > now ? next - now : 0;
        struct timespec wait = {.tv_sec = (time_t)(left / 1000000000U),
                                .tv_nsec = (long)(left % 1000000000U)};
        ppoll(polled, 2, next == UINT64_MAX ? NULL : &wait, NULL);
    }
}
