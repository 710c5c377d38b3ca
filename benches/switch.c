// A switch whose cables are long: each has a rate, a delay, random loss and a queue in both directions.
// For kernels without netem. It forwards whole Ethernet frames by AF_PACKET, so it runs in a namespace that
// has the other ends of all cables, and needs root.
//
//   cc -O2 -o switch switch.c
//   switch --plain IF                     in each host: no checksum and segmentation offload, for frames that pass here
//   switch --offload IF                   in each host, afterwards: as before
//   switch QUEUE_MS SEED IF:RATE_MBIT:DELAY_MS:LOSS_PERCENT ...
//
// Of a frame from A to B: it is lost with the probability of A's cable, waits for A's cable, travels for the
// delays of both, and waits for B's cable. A frame that would wait longer than QUEUE_MS for one is dropped.
// On SIGTERM it prints how many frames came, were lost, and were dropped.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/ethtool.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { FRAME = 2048, BATCH = 64, PORTS = 64, OVERHEAD = 24 /* preamble, checksum and gap */ };

static volatile sig_atomic_t over;

static void stop(int signal) {
    (void)signal;
    over = 1;
}

static void die(const char *what) {
    perror(what);
    exit(1);
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static void offload(const char *name, uint32_t on) {
    int s = socket(AF_INET, SOCK_DGRAM, 0);
    uint32_t what[] = {ETHTOOL_STXCSUM, ETHTOOL_STSO, ETHTOOL_SGSO, ETHTOOL_SGRO};
    for (int i = 0; i < 4; i++) {
        struct ethtool_value value = {what[i], on};
        struct ifreq request = {0};
        strncpy(request.ifr_name, name, IFNAMSIZ - 1);
        request.ifr_data = (void *)&value;
        if (ioctl(s, SIOCETHTOOL, &request) && errno != EOPNOTSUPP) die("ethtool");
    }
    close(s);
}

static int open_port(const char *name) {
    int s = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK, htons(ETH_P_ALL));
    if (s < 0) die("socket");
    struct sockaddr_ll at = {
        .sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL), .sll_ifindex = if_nametoindex(name)};
    if (!at.sll_ifindex || bind(s, (void *)&at, sizeof at)) die(name);
    struct packet_mreq all = {.mr_ifindex = at.sll_ifindex, .mr_type = PACKET_MR_PROMISC};
    setsockopt(s, SOL_PACKET, PACKET_ADD_MEMBERSHIP, &all, sizeof all);
    int one = 1, big = 64 << 20;
    setsockopt(s, SOL_PACKET, PACKET_IGNORE_OUTGOING, &one, sizeof one);
    setsockopt(s, SOL_SOCKET, SO_RCVBUFFORCE, &big, sizeof big);
    setsockopt(s, SOL_SOCKET, SO_SNDBUFFORCE, &big, sizeof big);
    return s;
}

struct frame {
    int64_t due;
    int len;
    uint8_t *data;
};

// Frames in the order in which they leave.
struct line {
    struct frame *ring;
    uint64_t head, tail, size;
    int64_t free_at;
};

struct port {
    int socket;
    double rate, loss;
    int64_t delay;
    uint8_t mac[6];
    int known;
    struct line up, down;
    uint64_t frames, lost, full;
};

static struct port ports[PORTS];
static int count;

static void push(struct line *line, int64_t due, uint8_t *data, int len) {
    if (line->head - line->tail == line->size) {
        uint64_t size = line->size ? 2 * line->size : 1024;
        struct frame *ring = malloc(size * sizeof *ring);
        if (!ring) die("malloc");
        for (uint64_t i = line->tail; i < line->head; i++) ring[i & (size - 1)] = line->ring[i & (line->size - 1)];
        free(line->ring);
        line->ring = ring;
        line->size = size;
    }
    line->ring[line->head++ & (line->size - 1)] = (struct frame){due, len, data};
}

static struct frame *first(struct line *line) {
    return line->tail < line->head ? &line->ring[line->tail & (line->size - 1)] : NULL;
}

// Waits for a cable; -1 if that would take too long.
static int64_t pass(struct line *line, int64_t at, int len, double rate, int64_t queue) {
    int64_t start = line->free_at > at ? line->free_at : at;
    if (start - at > queue) return -1;
    line->free_at = start + (int64_t)((len + OVERHEAD) * 8e3 / rate);
    return line->free_at;
}

static uint8_t *copy(const uint8_t *data, int len) {
    uint8_t *made = malloc(len);
    if (!made) die("malloc");
    return memcpy(made, data, len);
}

int main(int argc, char **argv) {
    if (argc == 3 && (!strcmp(argv[1], "--plain") || !strcmp(argv[1], "--offload"))) {
        offload(argv[2], !strcmp(argv[1], "--offload"));
        return 0;
    }
    if (argc < 5 || argc - 3 > PORTS) {
        fprintf(stderr, "usage: switch QUEUE_MS SEED IF:RATE_MBIT:DELAY_MS:LOSS_PERCENT ... (2 to 64)\n");
        return 2;
    }
    int64_t queue = (int64_t)(atof(argv[1]) * 1e6);
    uint64_t state = strtoull(argv[2], 0, 10) * 0x9E3779B97F4A7C15ull + 1;
    for (int i = 3; i < argc; i++) {
        struct port *port = &ports[count++];
        char name[IFNAMSIZ];
        double delay;
        if (sscanf(argv[i], "%15[^:]:%lf:%lf:%lf", name, &port->rate, &delay, &port->loss) != 4) {
            fprintf(stderr, "switch: %s is no IF:RATE_MBIT:DELAY_MS:LOSS_PERCENT\n", argv[i]);
            return 2;
        }
        port->delay = (int64_t)(delay * 1e6);
        offload(name, 0);
        port->socket = open_port(name);
    }
    signal(SIGTERM, stop);
    signal(SIGINT, stop);
    printf("ready\n");
    fflush(stdout);
    struct mmsghdr messages[BATCH];
    struct iovec slices[BATCH];
    static uint8_t buffers[BATCH][FRAME];
    while (!over) {
        int64_t wake = INT64_MAX;
        for (struct port *from = ports; from < ports + count; from++) {
            for (int full = 1; full;) {
                for (int i = 0; i < BATCH; i++) {
                    slices[i] = (struct iovec){buffers[i], FRAME};
                    messages[i] = (struct mmsghdr){.msg_hdr = {.msg_iov = &slices[i], .msg_iovlen = 1}};
                }
                int n = recvmmsg(from->socket, messages, BATCH, MSG_DONTWAIT, 0);
                int64_t t = now_ns();
                full = n == BATCH;
                for (int i = 0; i < n; i++) {
                    int len = (int)messages[i].msg_len, arp = buffers[i][12] == 8 && buffers[i][13] == 6;
                    memcpy(from->mac, buffers[i] + 6, 6);
                    from->known = 1;
                    from->frames++;
                    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
                    if ((state >> 11) * 0x1p-53 * 100 < from->loss && !arp) {
                        from->lost++;
                        continue;
                    }
                    int64_t due = pass(&from->up, t, len, from->rate, queue);
                    if (due < 0) from->full++;
                    else push(&from->up, due + from->delay, copy(buffers[i], len), len);
                }
            }
        }
        // What has travelled its first half goes on to the cables of its destinations, the earliest first.
        for (;;) {
            struct port *from = NULL;
            for (struct port *each = ports; each < ports + count; each++) {
                if (first(&each->up) && (!from || first(&each->up)->due < first(&from->up)->due)) from = each;
            }
            if (!from) break;
            struct frame frame = *first(&from->up);
            if (frame.due > now_ns()) {
                wake = frame.due;
                break;
            }
            from->up.tail++;
            struct port *known = NULL;
            for (struct port *each = ports; each < ports + count; each++) {
                if (each->known && !memcmp(each->mac, frame.data, 6)) known = each;
            }
            for (struct port *to = ports; to < ports + count; to++) {
                if (to == from || (known && to != known)) continue;
                int64_t due = pass(&to->down, frame.due, frame.len, to->rate, queue);
                if (due < 0) to->full++;
                else push(&to->down, due + to->delay, copy(frame.data, frame.len), frame.len);
            }
            free(frame.data);
        }
        for (struct port *to = ports; to < ports + count; to++) {
            for (struct frame *frame; (frame = first(&to->down));) {
                int n = 0;
                int64_t t = now_ns();
                for (; n < BATCH && to->down.tail + n < to->down.head; n++) {
                    frame = &to->down.ring[(to->down.tail + n) & (to->down.size - 1)];
                    if (frame->due > t) break;
                    slices[n] = (struct iovec){frame->data, (size_t)frame->len};
                    messages[n] = (struct mmsghdr){.msg_hdr = {.msg_iov = &slices[n], .msg_iovlen = 1}};
                }
                if (!n) {
                    if (frame->due < wake) wake = frame->due;
                    break;
                }
                int sent = sendmmsg(to->socket, messages, n, 0);
                if (sent <= 0 && (errno == EAGAIN || errno == ENOBUFS)) {
                    if (t + 100000 < wake) wake = t + 100000;
                    break;
                }
                for (sent = sent <= 0 ? 1 : sent; sent; sent--) free(first(&to->down)->data), to->down.tail++;
            }
        }
        struct pollfd polled[PORTS];
        for (int i = 0; i < count; i++) polled[i] = (struct pollfd){ports[i].socket, POLLIN, 0};
        int64_t nap = wake == INT64_MAX ? 200000000 : wake - now_ns();
        if (nap > 0) ppoll(polled, count, &(struct timespec){nap / 1000000000, nap % 1000000000}, 0);
    }
    for (int i = 0; i < count; i++) {
        printf("%s: %lu frames, %lu lost, %lu dropped\n", strtok(argv[3 + i], ":"), ports[i].frames, ports[i].lost,
            ports[i].full);
    }
    return 0;
}
