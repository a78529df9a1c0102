/* A C program that calls numba_prefix from threads of its own; loaded by c_callers.py. Functions return 0, or the line of
 * the check that failed. */
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "numba_prefix.h"

#define CHECK(condition) \
    do {                 \
        if (!(condition)) \
            return __LINE__; \
    } while (0)
#define MAX_THREADS 16

typedef struct Problem {
    const NumbaPrefixTensor *query, *key, *value, *blockTables, *mask, *seqLen, *kvSeqLen, *slopes;
    const NumbaPrefixTensor *attnOut; /* of the expected bytes */
    int maskType;
    int32_t headNum, kvHeadNum;
    float qkScale;
    uint64_t outBytes;
} Problem;

typedef struct Thread {
    const NumbaPrefixApi *api;
    const Problem *problem;
    int calls, failed_line;
    pthread_t id;
} Thread;

static NumbaPrefixStatus plan(const NumbaPrefixApi *api, const Problem *p, int mask_type, NumbaPrefixTensor *out,
                              uint64_t *size, NumbaPrefixOperation **op, NumbaPrefixContext *context)
{
    return api->AtbSelfAttentionPrefixEncoderGetWorkspaceSize(
        p->query, p->key, p->value, p->blockTables, p->mask, p->seqLen, p->kvSeqLen, p->slopes, mask_type, p->headNum,
        p->kvHeadNum, p->qkScale, out, size, op, context);
}

static int failing_calls(Thread *t)
{
    char text[200];
    uint64_t size = 7;
    NumbaPrefixOperation *op = NULL;
    NumbaPrefixTensor out = *t->problem->attnOut;
    CHECK(plan(t->api, t->problem, 77, &out, &size, &op, NULL) == NUMBA_PREFIX_ERROR_INVALID_PARAM);
    CHECK(size == 7 && op == NULL);
    CHECK(t->api->NumbaPrefixGetLastError(text, sizeof text) > 0);
    CHECK(strncmp(text, "mask_type: got 77, expected ", 28) == 0);
    CHECK(t->api->AtbSelfAttentionPrefixEncoder(NULL, 0, NULL, NULL) == NUMBA_PREFIX_ERROR_INVALID_OPERATION_ADDR);
    CHECK(t->api->NumbaPrefixGetLastError(text, sizeof text) > 0);
    CHECK(strncmp(text, "op: got NULL, expected ", 23) == 0);
    return 0;
}

static int calls(Thread *t)
{
    const Problem *p = t->problem;
    NumbaPrefixTensor out = *p->attnOut;
    NumbaPrefixContext context = {2, NUMBA_PREFIX_TARGET_CPU};
    NumbaPrefixOperation *op = NULL;
    uint64_t size = 0;
    unsigned char *workspace;
    int call, line;

    CHECK((out.data = malloc(p->outBytes)) != NULL);
    CHECK(plan(t->api, p, p->maskType, &out, &size, &op, &context) == NUMBA_PREFIX_NO_ERROR);
    CHECK(size > 0 && op != NULL);
    CHECK((workspace = malloc(size + 1)) != NULL);
    workspace[size] = 0xA5;
    for (call = 0; call < t->calls; call++) {
        memset(out.data, 0xFF, p->outBytes);
        CHECK(t->api->AtbSelfAttentionPrefixEncoder(workspace, size, op, &context) == NUMBA_PREFIX_NO_ERROR);
        CHECK(memcmp(out.data, p->attnOut->data, p->outBytes) == 0);
        CHECK(t->api->NumbaPrefixGetLastError(NULL, 0) == 0);
        if ((line = failing_calls(t)) != 0)
            return line;
    }
    CHECK(workspace[size] == 0xA5);
    CHECK(t->api->NumbaPrefixDestroyOperation(op) == NUMBA_PREFIX_NO_ERROR);
    CHECK(t->api->AtbSelfAttentionPrefixEncoder(workspace, size, op, NULL) == NUMBA_PREFIX_ERROR_INVALID_OPERATION_ADDR);
    free(workspace);
    free(out.data);
    return 0;
}

static void *live(void *thread)
{
    ((Thread *)thread)->failed_line = calls(thread);
    return NULL;
}

int call_from_threads(const NumbaPrefixApi *api, const Problem *problem, int num_threads, int num_calls)
{
    Thread threads[MAX_THREADS];
    int i, failed_line = 0;
    CHECK(api->version == NUMBA_PREFIX_API_VERSION && num_threads <= MAX_THREADS);
    for (i = 0; i < num_threads; i++) {
        threads[i].api = api;
        threads[i].problem = problem;
        threads[i].calls = num_calls;
        CHECK(pthread_create(&threads[i].id, NULL, live, &threads[i]) == 0);
    }
    for (i = 0; i < num_threads; i++) {
        CHECK(pthread_join(threads[i].id, NULL) == 0);
        if (threads[i].failed_line != 0)
            failed_line = threads[i].failed_line;
    }
    return failed_line;
}

/* A signal comes while this thread runs C code; Python sees it as the next call begins, and as the one after begins. */
int call_with_a_signal(const NumbaPrefixApi *api, int signal_number)
{
    NumbaPrefixOperation *never = (NumbaPrefixOperation *)(uintptr_t)1;
    int i;
    CHECK(raise(signal_number) == 0);
    for (i = 0; i < 2; i++)
        CHECK(api->NumbaPrefixDestroyOperation(never) == NUMBA_PREFIX_ERROR_RT_FAIL);
    return 0;
}

static const NumbaPrefixApi *api_at_exit;

static void call_at_exit(void)
{
    if (api_at_exit->NumbaPrefixDestroyOperation(NULL) != NUMBA_PREFIX_ERROR_RT_FAIL)
        _exit(3);
}

int call_after_the_interpreter(const NumbaPrefixApi *api)
{
    api_at_exit = api;
    return atexit(call_at_exit);
}
