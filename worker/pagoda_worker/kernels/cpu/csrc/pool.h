// Threads that compute one step together and sleep between steps.
//
// The caller is thread 0 and is pinned to its own core for the duration of a step, because two threads on one core would
// spin against each other. Within a step, threads meet at a barrier after every operation; a waiting thread spins for a
// short while, because the others are about to arrive, and then sleeps on a futex, because the machine may be busy with
// something else. Between steps no thread spins.
#pragma once

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <ctime>
#include <thread>
#include <vector>

class Pool {
 public:
  explicit Pool(const std::vector<int>& cpus) : size_((int)cpus.size()), caller_cpu_(cpus[0]) {
    for (int t = 1; t < size_; ++t)
      threads_.emplace_back([this, t, cpu = cpus[t]] {
        pin(cpu);
        work(t);
      });
  }

  ~Pool() {
    stopping_ = true;
    start_.fetch_add(1);
    wake(start_);
    for (auto& thread : threads_) thread.join();
  }

  int size() const { return size_; }
  // Number of completed barriers.
  uint32_t meetings() const { return round_.load(std::memory_order_relaxed); }

  // Runs body(thread) on every thread; returns when all are done. One call at a time, unless the pool has only one thread.
  template <typename F>
  void run(F& body) {
    if (size_ == 1) return body(0);
    cpu_set_t before;
    bool moved = caller_cpu_ >= 0 && pthread_getaffinity_np(pthread_self(), sizeof before, &before) == 0;
    if (moved) pin(caller_cpu_);
    call_ = [](void* f, int thread) { (*(F*)f)(thread); };
    argument_ = &body;
    start_.fetch_add(1, std::memory_order_release);
    wake(start_);
    body(0);
    barrier();
    if (moved) pthread_setaffinity_np(pthread_self(), sizeof before, &before);
  }

  // All threads of a `run` meet here.
  void barrier() {
    if (size_ == 1) return;
    uint32_t round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.fetch_add(1, std::memory_order_seq_cst);  // either we see the sleeper or it sees the new round, see `wait`
      if (sleepers_.load(std::memory_order_seq_cst) != 0) wake(round_);
      return;
    }
    wait(round_, round, true);
  }

 private:
  static constexpr long SPIN_NS = 50000;

  static void pin(int cpu) {
    if (cpu < 0) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
  }

  static void wake(std::atomic<uint32_t>& word) { syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0); }

  static long now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
  }

  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  // Waits until word != old.
  void wait(std::atomic<uint32_t>& word, uint32_t old, bool spin) {
    long deadline = spin ? now_ns() + SPIN_NS : 0;
    while (spin) {
      for (int i = 0; i < 64; ++i) {
        if (word.load(std::memory_order_acquire) != old) return;
        relax();
      }
      if (now_ns() > deadline) break;
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (word.load(std::memory_order_seq_cst) == old)
      syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

  void work(int thread) {
    uint32_t seen = 0;
    for (;;) {
      wait(start_, seen, false);
      seen = start_.load(std::memory_order_acquire);
      if (stopping_) return;
      call_(argument_, thread);
      barrier();
    }
  }

  const int size_;
  const int caller_cpu_;
  std::vector<std::thread> threads_;
  void (*call_)(void*, int) = nullptr;
  void* argument_ = nullptr;
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<uint32_t> start_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
  alignas(64) std::atomic<int> sleepers_{0};
};
