// SPDX-License-Identifier: Apache-2.0
// Threads that wait for work between calls.
//
// One set per process, made at the first call that wants more than one thread. Two callers at once do not share it: the
// second runs its work on its own thread, with the same bits. A forked child starts without threads and makes its own.
#pragma once
#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>

namespace attnrt_cpu {

// A job is a function of a worker's number; numbers are handed out one by one, so that few threads serve many workers.
struct Job {
  int (*run)(void* context, int worker);
  void* context;
  int num_workers;
  std::atomic<int> next{0};
  std::atomic<int> failed{0};

  void work() {
    for (int w = next.fetch_add(1); w < num_workers; w = next.fetch_add(1))
      if (run(context, w)) failed.store(1);
  }
};

class Pool {
 public:
  static void run(Job& job, int num_threads) {
    Pool* pool = get();
    std::unique_lock<std::mutex> turn(pool->turn_, std::try_to_lock);
    if (num_threads > job.num_workers) num_threads = job.num_workers;
    if (!turn.owns_lock() || num_threads < 2 || !pool->grow(num_threads - 1)) {
      job.work();
      return;
    }
    {
      std::lock_guard<std::mutex> lock(pool->mutex_);
      pool->job_ = &job;
      pool->wanted_ = pool->busy_ = num_threads - 1;
      ++pool->round_;
    }
    pool->wake_.notify_all();
    job.work();
    std::unique_lock<std::mutex> lock(pool->mutex_);
    pool->done_.wait(lock, [pool] { return pool->busy_ == 0; });
    pool->job_ = nullptr;
  }

 private:
  static Pool*& slot() {
    static Pool* pool = nullptr;
    return pool;
  }

  static Pool* get() {
    static std::once_flag once;
    std::call_once(once, [] {
      slot() = new Pool;
      pthread_atfork(nullptr, nullptr, [] { slot() = new Pool; });  // the parent's threads do not exist here
    });
    return slot();
  }

  bool grow(int count) {
    try {
      for (; size_ < count; ++size_) std::thread(&Pool::loop, this, size_, round_).detach();
    } catch (...) {
      return size_ >= count;
    }
    return true;
  }

  void loop(int index, unsigned seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return round_ != seen; });
      seen = round_;
      if (index >= wanted_ || !job_) continue;
      Job* job = job_;
      lock.unlock();
      job->work();
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::mutex turn_, mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  unsigned round_ = 0;
  int size_ = 0, wanted_ = 0, busy_ = 0;
};

}  // namespace attnrt_cpu
