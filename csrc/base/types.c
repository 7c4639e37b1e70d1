#include <math.h>
#include <stdbool.h>

#include "base/types.h"

uint32_t smb_dtype_bytes(int dtype)
{
    switch (dtype) {
    case SMB_UINT8:
    case SMB_INT8:
    case SMB_BOOL:
    case SMB_FLOAT8_E4M3FN:
    case SMB_FLOAT8_E5M2: return 1;
    case SMB_FLOAT16:
    case SMB_BFLOAT16:
    case SMB_INT16:
    case SMB_UINT16: return 2;
    case SMB_FLOAT32:
    case SMB_INT32:
    case SMB_UINT32: return 4;
    case SMB_FLOAT64:
    case SMB_INT64:
    case SMB_UINT64:
    case SMB_COMPLEX64: return 8;
    default: return 0;
    }
}

int smb_dtype_is_atomic(int dtype)
{
    switch (dtype) {
    case SMB_FLOAT32:
    case SMB_FLOAT64:
    case SMB_INT32:
    case SMB_INT64:
    case SMB_UINT32:
    case SMB_UINT64: return 1;
    default: return 0;
    }
}

static bool has_bits(int dtype)
{
    switch (dtype) {
    case SMB_INT8:
    case SMB_UINT8:
    case SMB_INT16:
    case SMB_UINT16:
    case SMB_INT32:
    case SMB_UINT32:
    case SMB_INT64:
    case SMB_UINT64:
    case SMB_BOOL: return true;
    default: return false;
    }
}

int smb_op_accepts(int dtype, int op, double scale)
{
    if (op < SMB_SUM || op > SMB_BXOR || !smb_dtype_bytes(dtype))
        return 0;
    if (op >= SMB_BAND)
        return has_bits(dtype) && scale == 1.0;
    double low, high; /* the scale must be in [low, high) */
    switch (dtype) {
    case SMB_FLOAT16:
    case SMB_FLOAT32:
    case SMB_FLOAT64:
    case SMB_BFLOAT16: return 1;
    case SMB_UINT8: low = 0, high = 0x1p8; break;
    case SMB_INT32: low = -0x1p31, high = 0x1p31; break;
    case SMB_INT64: low = -0x1p63, high = 0x1p63; break;
    default: return op == SMB_REPLACE && scale == 1.0;
    }
    return scale >= low && scale < high && scale == trunc(scale);
}

int smb_rule_states(int rule)
{
    switch (rule) {
    case SMB_RULE_SGD:
    case SMB_RULE_ELASTIC: return 0;
    case SMB_RULE_MOMENTUM:
    case SMB_RULE_NESTEROV: return 1;
    case SMB_RULE_ADAM:
    case SMB_RULE_ADAMW: return 2;
    default: return -1;
    }
}

static bool is_number(double value)
{
    return isfinite((float)value);
}

int smb_rule_accepts(int rule, const struct smb_hyper *hyper)
{
    if (rule == SMB_RULE_ELASTIC)
        return is_number(hyper->alpha);
    if (smb_rule_states(rule) < 0 || !is_number(hyper->lr) || !is_number(hyper->scale) ||
        !is_number(hyper->weight_decay))
        return 0;
    switch (smb_rule_states(rule)) {
    case 0: return 1;
    case 1: return is_number(hyper->mu);
    default:
        return hyper->beta1 >= 0 && hyper->beta1 < 1 && hyper->beta2 >= 0 && hyper->beta2 < 1 &&
               hyper->eps >= 0 && is_number(hyper->eps) && hyper->step >= 1 &&
               hyper->step <= 0x1p53 && hyper->step == trunc(hyper->step);
    }
}

int smb_wire_is_dense(int wire)
{
    return wire == SMB_WIRE_BFLOAT16 || wire == SMB_WIRE_FLOAT16 || wire == SMB_WIRE_INT8 ||
           wire == SMB_WIRE_INT4;
}

uint64_t smb_wire_bytes(int wire, uint64_t count)
{
    switch (wire) {
    case SMB_WIRE_EXACT: return 4 * count;
    case SMB_WIRE_BFLOAT16:
    case SMB_WIRE_FLOAT16: return 2 * count;
    case SMB_WIRE_INT8: return count + 4 * ((count + SMB_WIRE_BLOCK - 1) / SMB_WIRE_BLOCK);
    case SMB_WIRE_INT4: {
        uint64_t rest = count % SMB_WIRE_INT4_BLOCK;
        return count / SMB_WIRE_INT4_BLOCK * INT4_BLOCK_BYTES + (rest ? 4 + (rest + 1) / 2 : 0);
    }
    default: return 0;
    }
}
