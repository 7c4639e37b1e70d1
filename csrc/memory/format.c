#include "memory/format.h"

#include "base/namespaces.h"
#include "smb/segment.h"

uint32_t format_own_pid_namespace(void)
{
    return namespace_inode("/proc/self/ns/pid");
}

uint64_t format_chunk_count(uint64_t data_bytes, uint32_t chunk_bytes)
{
    return data_bytes / chunk_bytes + (data_bytes % chunk_bytes != 0);
}

uint64_t format_records_offset(uint64_t data_bytes, uint32_t chunk_bytes)
{
    return PAGE +
           format_round_up_to_page(format_chunk_count(data_bytes, chunk_bytes) * CHUNK_STATE_BYTES);
}

uint64_t format_data_offset(uint64_t data_bytes, uint32_t chunk_bytes, uint32_t record_count)
{
    return format_records_offset(data_bytes, chunk_bytes) +
           format_round_up_to_page((uint64_t)record_count * RECORD_BYTES);
}

static uint64_t file_bytes_for(uint64_t data_bytes, uint32_t chunk_bytes, uint32_t record_count)
{
    if (data_bytes == 0 || data_bytes > (uint64_t)1 << 56 || chunk_bytes < SMB_CHUNK_BYTES_MIN ||
        chunk_bytes > SMB_CHUNK_BYTES_MAX || chunk_bytes % SMB_CHUNK_BYTES_MIN != 0)
        return 0;
    return format_data_offset(data_bytes, chunk_bytes, record_count) +
           format_round_up_to_page(data_bytes);
}

uint64_t smb_segment_file_bytes(uint64_t data_bytes, uint32_t chunk_bytes)
{
    return file_bytes_for(data_bytes, chunk_bytes, records_count_for(data_bytes));
}

bool format_is_sound(const struct header *header, uint64_t real_bytes)
{
    uint32_t records = header->record_count;
    uint64_t file_bytes = file_bytes_for(header->data_bytes, header->chunk_bytes, records);
    /* A file that was created in the previous format keeps its number of records. */
    return (records == records_count_for(header->data_bytes) ||
            records == records_count_before(header->data_bytes)) &&
           file_bytes != 0 && header->file_bytes == file_bytes && real_bytes == file_bytes &&
           header->chunks_offset == PAGE && header->id != 0 &&
           header->records_offset ==
               format_records_offset(header->data_bytes, header->chunk_bytes) &&
           header->data_offset ==
               format_data_offset(header->data_bytes, header->chunk_bytes, records) &&
           smb_dtype_bytes((int)header->dtype) != 0;
}

int format_check_sharing(const struct header *header)
{
    if (header->format_version != FORMAT_VERSION || header->lock_abi != LOCK_ABI)
        return SMB_VERSION;
    uint32_t own = format_own_pid_namespace();
    return own != 0 && own == atomic_load_explicit(&header->pid_namespace, memory_order_relaxed)
               ? SMB_OK
               : SMB_NAMESPACE;
}

int format_check_taking_over(struct header *header)
{
    if ((header->format_version != FORMAT_VERSION && !format_is_replicated(header) &&
         header->format_version != FORMAT_WITHOUT_NAMESPACE) ||
        header->lock_abi != LOCK_ABI)
        return SMB_VERSION;
    if (!format_is_replicated(header))
        header->format_version = FORMAT_VERSION;
    atomic_store_explicit(&header->pid_namespace, format_own_pid_namespace(), memory_order_relaxed);
    return SMB_OK;
}
