/* Threads that share the work of a forward pass.
 *
 * The caller leads and takes part. Helpers sleep between passes. A task is cut into chunks, and each thread takes the
 * next chunk until none is left. So the caller waits for a delayed helper only if that helper has a chunk. Without
 * helpers the caller does the whole task. The result of a chunk does not depend on the thread that computes it.
 */
#pragma once
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include "simd.h"

enum {
    SPINS = 2000, /* about 20 to 50 us; a phase of a pass is shorter */
    LINE = 64,
    SMALLER = 4 /* how much smaller the last chunks of a task are */
};

/* Compute units first .. end of a task. `worker` is 0 for the caller, then 1, 2, ... */
typedef void Work(const void *task, int first, int end, int worker);

typedef struct {
    int num_threads, num_helpers, chunk; /* threads: with the caller; helpers: started ones */
    Work *work;
    const void *task;
    pthread_t *helpers;
    pthread_mutex_t lock;
    pthread_cond_t called;
    long num_calls; /* protected by the lock, like is_over */
    int is_over;
    _Alignas(LINE) atomic_int is_open, num_seated;
    _Alignas(LINE) atomic_ullong ticket; /* units on offer << 32 | units taken */
    _Alignas(LINE) atomic_int num_done;
} Team;

INLINE void pause_spin(int spins) {
    if (spins >= SPINS) {
        sched_yield();
        return;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Return the units of the next chunk. The last chunks are smaller, so that all threads end at about the same time. */
INLINE int next_chunk(const Team *t, int left) {
    const int share = left / (2 * t->num_threads), least = (t->chunk + SMALLER - 1) / SMALLER;
    return MIN(left, MIN(t->chunk, share > least ? share : least));
}

/* Take chunks until none is left; return how many. The task cannot change meanwhile: `share` waits for all units. */
static int work_on(Team *t, int worker) {
    int count = 0;
    unsigned long long ticket = atomic_load_explicit(&t->ticket, memory_order_acquire);
    while ((uint32_t)ticket < ticket >> 32) {
        const int first = (int)(uint32_t)ticket, units = next_chunk(t, (int)(ticket >> 32) - first);
        if (atomic_compare_exchange_weak_explicit(&t->ticket, &ticket, ticket + units, memory_order_acq_rel,
                                                  memory_order_acquire)) {
            t->work(t->task, first, first + units, worker);
            atomic_fetch_add_explicit(&t->num_done, units, memory_order_release);
            count++, ticket = atomic_load_explicit(&t->ticket, memory_order_acquire);
        }
    }
    return count;
}

static void *help(void *team) {
    Team *t = team;
    int worker = 1 + atomic_fetch_add(&t->num_seated, 1);
    long seen = 0;
    pthread_mutex_lock(&t->lock);
    while (!t->is_over) {
        if (seen == t->num_calls) {
            pthread_cond_wait(&t->called, &t->lock);
            continue;
        }
        seen = t->num_calls;
        pthread_mutex_unlock(&t->lock);
        for (int spins = 0; atomic_load_explicit(&t->is_open, memory_order_relaxed); spins++)
            if (work_on(t, worker))
                spins = 0;
            else
                pause_spin(spins);
        pthread_mutex_lock(&t->lock);
    }
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

/* Compute a task of `num_units` units, at most `chunk` at a time. Without a team the caller computes it alone. */
static void share(Team *t, Work *work, const void *task, int num_units, int chunk) {
    if (!t || num_units <= chunk) {
        work(task, 0, num_units, 0);
        return;
    }
    t->work = work, t->task = task, t->chunk = chunk;
    atomic_store_explicit(&t->num_done, 0, memory_order_relaxed);
    atomic_store_explicit(&t->ticket, (unsigned long long)num_units << 32, memory_order_release);
    work_on(t, 0);
    for (int spins = 0; atomic_load_explicit(&t->num_done, memory_order_acquire) < num_units; spins++) pause_spin(spins);
}

/* The helpers are awake between call_team and dismiss_team. */
static void call_team(Team *t) {
    if (!t) return;
    atomic_store(&t->is_open, 1);
    pthread_mutex_lock(&t->lock);
    t->num_calls++;
    pthread_cond_broadcast(&t->called);
    pthread_mutex_unlock(&t->lock);
}

static void dismiss_team(Team *t) {
    if (!t) return;
    atomic_store(&t->is_open, 0);
}

static int start_helper(Team *t) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* helpers must not receive signals */
    int error = pthread_create(&t->helpers[t->num_helpers], NULL, help, t);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    t->num_helpers += !error;
    return error;
}

static int pin(pthread_t thread, int core) {
#ifdef __linux__
    cpu_set_t cores;
    CPU_ZERO(&cores);
    if (core < 0 || core >= CPU_SETSIZE) return -1;
    CPU_SET(core, &cores);
    return pthread_setaffinity_np(thread, sizeof(cores), &cores);
#else
    return 0;
#endif
}

void specq_team_free(Team *t) {
    pthread_mutex_lock(&t->lock);
    t->is_over = 1;
    pthread_cond_broadcast(&t->called);
    pthread_mutex_unlock(&t->lock);
    for (int i = 0; i < t->num_helpers; i++) pthread_join(t->helpers[i], NULL);
    free(t->helpers);
    free(t);
}

/* Start `num_free` helpers on the caller's cores, then one pinned to each of `cores`. NULL if one cannot start. */
Team *specq_team_new(int num_free, int num_pinned, const int32_t *cores) {
    Team *t = aligned_alloc(LINE, sizeof(Team));
    if (!t) return NULL;
    memset(t, 0, sizeof(Team));
    t->num_threads = 1 + num_free + num_pinned;
    t->helpers = calloc(num_free + num_pinned, sizeof(pthread_t));
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->called, NULL);
    for (int i = 0; i < num_free + num_pinned; i++)
        if (start_helper(t) || (i >= num_free && pin(t->helpers[i], cores[i - num_free]))) {
            specq_team_free(t);
            return NULL;
        }
    return t;
}
