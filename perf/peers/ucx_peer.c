/* Called by perf/peers/ucx.py: one UCX worker, memory that others reach, and put, get and fetch-add
 * on such memory.
 *
 * Each call blocks until its effect is at the target (put: flushed). Functions give a ucs_status_t, 0 being good; a peer
 * belongs to one thread. Over TCP a target answers only within peer_progress.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <ucp/api/ucp.h>

struct peer {
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_mem_h memory; /* NULL where none is offered */
    ucp_ep_h target;  /* NULL until connected */
    ucp_rkey_h key;
    uint64_t address; /* of the memory, in its owner */
};

static ucs_status_t wait_for(struct peer *peer, ucs_status_ptr_t request) {
    ucs_status_t status;
    if (!UCS_PTR_IS_PTR(request)) return UCS_PTR_STATUS(request);
    do {
        ucp_worker_progress(peer->worker);
        status = ucp_request_check_status(request);
    } while (status == UCS_INPROGRESS);
    ucp_request_free(request);
    return status;
}

static ucs_status_t flush(struct peer *peer) {
    ucp_request_param_t param = {.op_attr_mask = 0};
    return wait_for(peer, ucp_ep_flush_nbx(peer->target, &param));
}

int peer_open(const char *transports, const char *devices, struct peer **out) {
    struct peer *peer = calloc(1, sizeof *peer);
    ucp_config_t *config;
    ucs_status_t status = peer ? ucp_config_read(NULL, NULL, &config) : UCS_ERR_NO_MEMORY;
    if (status != UCS_OK) return status;
    status = ucp_config_modify(config, "TLS", transports);
    if (status == UCS_OK && *devices) status = ucp_config_modify(config, "NET_DEVICES", devices);
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_RMA | UCP_FEATURE_AMO64};
    if (status == UCS_OK) status = ucp_init(&params, config, &peer->context);
    ucp_config_release(config);
    ucp_worker_params_t worker = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE, .thread_mode = UCS_THREAD_MODE_SINGLE};
    if (status == UCS_OK) status = ucp_worker_create(peer->context, &worker, &peer->worker);
    *out = peer;
    return status;
}

/* Offer nbytes of zeros. A client's data to connect: `address` and `key`, owned by UCX, and
 * `memory`. */
int peer_offer(struct peer *peer, size_t nbytes, void **memory, void **address, size_t *address_bytes, void **key,
               size_t *key_bytes) {
    ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_FLAGS,
        .length = nbytes,
        .address = NULL,
        .flags = UCP_MEM_MAP_ALLOCATE};
    ucp_mem_attr_t attributes = {.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS};
    ucp_address_t *worker_address;
    ucs_status_t status = ucp_mem_map(peer->context, &params, &peer->memory);
    if (status == UCS_OK) status = ucp_mem_query(peer->memory, &attributes);
    if (status == UCS_OK) status = ucp_rkey_pack(peer->context, peer->memory, key, key_bytes);
    if (status == UCS_OK) status = ucp_worker_get_address(peer->worker, &worker_address, address_bytes);
    if (status != UCS_OK) return status;
    *address = worker_address;
    *memory = attributes.address;
    memset(*memory, 0, nbytes);
    return UCS_OK;
}

int peer_connect(struct peer *peer, const void *address, const void *key, uint64_t memory) {
    ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS, .address = address};
    ucs_status_t status = ucp_ep_create(peer->worker, &params, &peer->target);
    if (status == UCS_OK) status = ucp_ep_rkey_unpack(peer->target, key, &peer->key);
    peer->address = memory;
    return status;
}

int peer_put(struct peer *peer, const void *source, size_t nbytes) {
    ucp_request_param_t param = {.op_attr_mask = 0};
    ucs_status_t status = wait_for(peer, ucp_put_nbx(peer->target, source, nbytes, peer->address, peer->key, &param));
    return status == UCS_OK ? flush(peer) : status;
}

int peer_get(struct peer *peer, void *into, size_t nbytes) {
    ucp_request_param_t param = {.op_attr_mask = 0};
    return wait_for(peer, ucp_get_nbx(peer->target, into, nbytes, peer->address, peer->key, &param));
}

int peer_fetch_add(struct peer *peer, int64_t value, int64_t *before) {
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_DATATYPE | UCP_OP_ATTR_FIELD_REPLY_BUFFER,
                                 .datatype = ucp_dt_make_contig(8),
                                 .reply_buffer = before};
    return wait_for(peer, ucp_atomic_op_nbx(peer->target, UCP_ATOMIC_OP_ADD, &value, 1, peer->address, peer->key, &param));
}

/* Answer others, for about that long. Gives how often there was something to do. */
long peer_progress(struct peer *peer, double seconds) {
    struct timespec now;
    long done = 0;
    clock_gettime(CLOCK_MONOTONIC, &now);
    double end = now.tv_sec + now.tv_nsec * 1e-9 + seconds;
    do {
        for (int i = 0; i < 100; i++) done += ucp_worker_progress(peer->worker);
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while (now.tv_sec + now.tv_nsec * 1e-9 < end);
    return done;
}

void peer_close(struct peer *peer) {
    if (peer->key) ucp_rkey_destroy(peer->key);
    if (peer->target) {
        ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = UCP_EP_CLOSE_FLAG_FORCE};
        wait_for(peer, ucp_ep_close_nbx(peer->target, &param));
    }
    if (peer->memory) ucp_mem_unmap(peer->context, peer->memory);
    if (peer->worker) ucp_worker_destroy(peer->worker);
    if (peer->context) ucp_cleanup(peer->context);
    free(peer);
}
