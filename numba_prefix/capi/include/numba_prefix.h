/*
 * The C interface of numba_prefix: paged-prefix attention on the CPU, in the two phases of Ascend
 * ATB's AtbSelfAttentionPrefixEncoder.
 *
 * Nothing is linked. In a process that hosts Python, numba_prefix.capi.load() gives the address of
 * a NumbaPrefixApi:
 *
 *     api = numba_prefix.capi.load(warmup=True)
 *     my_library.start(ctypes.c_void_p(api.table))
 *
 * Functions may be called from any thread, with or without Python's GIL, several at once. They take
 * the GIL to check and to plan; the computation itself runs without it. No exception leaves them.
 * An exception that is not the call's own (KeyboardInterrupt, an exit asked for by a signal
 * handler) ends a call with NUMBA_PREFIX_ERROR_RT_FAIL and is raised once the thread is back in
 * Python; until then further calls of that thread fail likewise. Threads must have left these
 * functions before the interpreter ends; after that, they return NUMBA_PREFIX_ERROR_RT_FAIL.
 *
 * C89 with <stdint.h>, or C++.
 */
#ifndef NUMBA_PREFIX_H
#define NUMBA_PREFIX_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Version of NumbaPrefixApi, to be compared with its member `version`. */
#define NUMBA_PREFIX_API_VERSION 1

/* Most axes of a tensor. */
#define NUMBA_PREFIX_MAX_DIMS 8

/* The numbers of ATB's ErrorType. */
typedef int32_t NumbaPrefixStatus;
enum {
    NUMBA_PREFIX_NO_ERROR = 0,
    /* a number, length or block id out of range, a NULL result pointer */
    NUMBA_PREFIX_ERROR_INVALID_PARAM = 1,
    /* a fault of numba_prefix */
    NUMBA_PREFIX_ERROR_INTERNAL_ERROR = 3,
    /* interrupted, no interpreter, or a target that cannot run here */
    NUMBA_PREFIX_ERROR_RT_FAIL = 4,
    /* an unknown code, or a type that the argument does not take */
    NUMBA_PREFIX_ERROR_INVALID_TENSOR_DTYPE = 6,
    /* dims NULL, negative, or a shape that the argument does not take */
    NUMBA_PREFIX_ERROR_INVALID_TENSOR_DIM = 8,
    /* more elements than an address space holds */
    NUMBA_PREFIX_ERROR_INVALID_TENSOR_SIZE = 9,
    /* tensor or data NULL, misaligned, or on another device */
    NUMBA_PREFIX_ERROR_INVALID_TENSOR_ADDR = 14,
    /* num_dims is not 1 ... NUMBA_PREFIX_MAX_DIMS */
    NUMBA_PREFIX_ERROR_INVALID_TENSOR_DIM_NUM = 16,
    /* fewer bytes than the first phase reported */
    NUMBA_PREFIX_ERROR_INVALID_WORKSPACE_SIZE = 22,
    /* NULL */
    NUMBA_PREFIX_ERROR_INVALID_WORKSPACE_ADDR = 23,
    /* NULL, never planned, or destroyed */
    NUMBA_PREFIX_ERROR_INVALID_OPERATION_ADDR = 24,
    NUMBA_PREFIX_ERROR_OUT_OF_HOST_MEMORY = 27
};

/* Element types, with the numbers of ACL's aclDataType. */
enum {
    NUMBA_PREFIX_FLOAT = 0, /* float32 */
    NUMBA_PREFIX_FLOAT16 = 1,
    NUMBA_PREFIX_INT8 = 2,
    NUMBA_PREFIX_INT32 = 3,
    NUMBA_PREFIX_UINT8 = 4,
    NUMBA_PREFIX_INT16 = 6,
    NUMBA_PREFIX_UINT16 = 7,
    NUMBA_PREFIX_UINT32 = 8,
    NUMBA_PREFIX_INT64 = 9,
    NUMBA_PREFIX_UINT64 = 10,
    NUMBA_PREFIX_DOUBLE = 11,
    NUMBA_PREFIX_BOOL = 12,
    NUMBA_PREFIX_BF16 = 27
};

/* Mask kinds, as the operator's page numbers them (ATB's C++ header has other numbers). */
enum {
    NUMBA_PREFIX_MASK_NONE = 0,
    NUMBA_PREFIX_MASK_ALIBI_COMPRESS = 3,
    NUMBA_PREFIX_MASK_ALIBI_COMPRESS_SQRT = 4,
    NUMBA_PREFIX_MASK_ALIBI_COMPRESS_LEFT_ALIGN = 5,
    NUMBA_PREFIX_MASK_CAUSAL_MASK = 9
};

/* Devices of a tensor's memory. */
enum { NUMBA_PREFIX_DEVICE_CPU = 0 };

/* Targets. AUTO is the CPU; REFERENCE is a slow float64 computation to judge results by. */
enum {
    NUMBA_PREFIX_TARGET_AUTO = 0,
    NUMBA_PREFIX_TARGET_CPU = 1,
    NUMBA_PREFIX_TARGET_CUDA = 2,
    NUMBA_PREFIX_TARGET_REFERENCE = 3
};

/*
 * A caller's array, read and written in place. This struct, dims and strides are read during the
 * call that they are given to and may be freed afterwards; the memory behind data has to stay until
 * the operation is destroyed or planned again.
 */
typedef struct NumbaPrefixTensor {
    /* address of element [0, ..., 0], a multiple of the element's size;
     * may be NULL if there are no elements */
    void *data;
    const int64_t *dims;    /* [num_dims] */
    const int64_t *strides; /* [num_dims], in elements, of either sign; NULL: dense, row-major */
    int32_t num_dims;       /* 1 ... NUMBA_PREFIX_MAX_DIMS */
    int32_t dtype;
    int32_t device;
} NumbaPrefixTensor;

/* Options of the computation. Zeros, or no context at all, let numba_prefix choose. */
typedef struct NumbaPrefixContext {
    int32_t num_threads; /* the most to use; 0: as many CPUs as the process may use */
    int32_t target;
} NumbaPrefixContext;

/* A planned operation: a handle to be passed on, not an address. */
typedef struct NumbaPrefixOperation NumbaPrefixOperation;

/*
 * First phase: check everything, plan, and report the bytes of workspace that the second phase
 * needs.
 *
 *   query        float16, bfloat16 or float32 [nTokens, headNum, headSize] or
 *                [nTokens, headNum * headSize]
 *   key, value   as query, [numBlocks, blockSize, kvHeadNum, headSize] or with the last two axes
 *                joined: the paged cache
 *   blockTables  int32 [batch, maxBlockNum]: blocks of each sequence (another integer type is
 *                copied during this call)
 *   mask         NULL, or an ALiBi mask [256, 256] or [headNum, maskLen, 128], of query's type or
 *                float32
 *   seqLen       int32, uint32 or int64 [batch]: query tokens of each sequence; copied during this
 *                call
 *   kvSeqLen     int32, uint32 or int64 [batch]: key tokens of each sequence, the query's included;
 *                copied during this call
 *   slopes       NULL, or float32 [headNum], for the ALiBi kinds
 *   kvHeadNum    0: headNum
 *   qkScale      multiplies every product of a query with a key
 *   attnOut      as query; every element is written, and nothing else
 *   op           *op is NULL for a new operation, or an operation to be planned again with these
 *                arguments
 *   context      may be NULL
 *
 * After an error *workspaceSize, *op and an operation that was to be planned again are unchanged.
 * Arrays whose last axis is not dense are copied at every run.
 */
typedef NumbaPrefixStatus (*AtbSelfAttentionPrefixEncoderGetWorkspaceSizeFunction)(
    const NumbaPrefixTensor *query, const NumbaPrefixTensor *key, const NumbaPrefixTensor *value,
    const NumbaPrefixTensor *blockTables, const NumbaPrefixTensor *mask, const NumbaPrefixTensor *seqLen,
    const NumbaPrefixTensor *kvSeqLen, const NumbaPrefixTensor *slopes, int maskType, int32_t headNum, int32_t kvHeadNum,
    float qkScale, NumbaPrefixTensor *attnOut, uint64_t *workspaceSize, NumbaPrefixOperation **op,
    NumbaPrefixContext *context);

/*
 * Second phase: compute, writing attnOut. It returns when that is done.
 *
 * workspace: workspaceSize bytes at any alignment, at least the number that the first phase
 * reported; exactly that many may be written. It may be NULL where that was 0. An operation may be
 * run any number of times, with other contents of its arrays too, and on several threads at once,
 * each with a workspace of its own (all of them write the same attnOut). Block ids are checked
 * every time. A context may lower the number of threads planned.
 */
typedef NumbaPrefixStatus (*AtbSelfAttentionPrefixEncoderFunction)(void *workspace, uint64_t workspaceSize,
                                                                   NumbaPrefixOperation *op, NumbaPrefixContext *context);

/* Free an operation; runs of it on other threads still complete. */
typedef NumbaPrefixStatus (*NumbaPrefixDestroyOperationFunction)(NumbaPrefixOperation *op);

/*
 * The error of the calling thread's last call: ASCII, "<argument>: got <what>, expected <what>"; ""
 * if it did not fail. At most size bytes are written to text, the last one of which is 0. Returns
 * the length of the whole text without the 0; text may be NULL if size is 0.
 */
typedef uint64_t (*NumbaPrefixGetLastErrorFunction)(char *text, uint64_t size);

/* Valid as long as the process lives. */
typedef struct NumbaPrefixApi {
    uint64_t version; /* NUMBA_PREFIX_API_VERSION of the library */
    AtbSelfAttentionPrefixEncoderGetWorkspaceSizeFunction AtbSelfAttentionPrefixEncoderGetWorkspaceSize;
    AtbSelfAttentionPrefixEncoderFunction AtbSelfAttentionPrefixEncoder;
    NumbaPrefixDestroyOperationFunction NumbaPrefixDestroyOperation;
    NumbaPrefixGetLastErrorFunction NumbaPrefixGetLastError;
} NumbaPrefixApi;

#ifdef __cplusplus
}
#endif

#endif
