/* atsc: the C interface of a compiled plan.
 *
 * A plan's library (libplan.so) exports one symbol, atsc_get_api, which returns a table of
 * functions. atsc_open.h finds, checks and loads that library; use it rather than dlopen.
 *
 * Rules that hold for every function:
 *   - It returns a status. Where that is not ATSC_OK, one line of text says what went wrong and what
 *     to do; it is written to `message` (which may be NULL), with `struct_size` set by the caller.
 *   - Every struct begins with `struct_size`, which the caller sets to sizeof the struct, also in
 *     those that the function fills. Zero the struct first: zero means the default in every field.
 *     A caller built against an older header passes a smaller struct and gets the defaults of what
 *     it does not know.
 *   - Handles are opaque. A plan may be used from any thread. A session may be used by one thread at
 *     a time (a second one is refused, not harmed), except session_cancel, which any thread may
 *     call at any time while the session exists. Rounds of one plan run one after the other.
 *   - Token ids are int32, logits float32. A failed call leaves the session usable: its position
 *     says how many tokens it holds, and it can be rewound.
 */
#ifndef ATSC_H
#define ATSC_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Raised with every change below. A plan serves callers built for any version from the oldest on: what
 * they know has not changed since, and what came later is at the end. */
#define ATSC_API_VERSION 4u
#define ATSC_API_OLDEST 2u
#define ATSC_MESSAGE_BYTES 1024

typedef int32_t atsc_status;
enum {
  ATSC_OK = 0,
  ATSC_INVALID_ARGUMENT = 1, /* the caller's mistake; nothing was done */
  ATSC_CONTEXT_FULL = 2,     /* the plan's context cannot hold so many tokens; nothing was done */
  ATSC_CANCELLED = 3,        /* session_cancel was called */
  ATSC_PLAN_ERROR = 4,       /* the plan, or a saved session, is damaged or made for something else */
  ATSC_DEVICE_ERROR = 5,     /* memory or threads are not to be had */
  ATSC_IO_ERROR = 6,         /* a file cannot be read or written */
  ATSC_INTERNAL_ERROR = 7    /* a mistake in atsc */
};

typedef struct atsc_plan atsc_plan;
typedef struct atsc_session atsc_session;

typedef struct atsc_message {
  size_t struct_size;
  char text[ATSC_MESSAGE_BYTES];
} atsc_message;

enum {
  ATSC_TRANSFER_LOAD_AWARE = 0, /* promotions follow the speeds that rounds show */
  ATSC_TRANSFER_STATIC = 1,     /* chosen once, from the speeds that the plan was compiled with */
  ATSC_TRANSFER_NONE = 2        /* long rounds stream the CPU's weights, others promote nothing */
};

enum {
  ATSC_ROUNDS_GRAPH = 0,      /* rounds of few tokens are one graph, others launches */
  ATSC_ROUNDS_LAUNCHES = 1,   /* all are launches */
  ATSC_ROUNDS_SYNCHRONOUS = 2 /* launches and copies on one stream, with a wait at each hand-off: what
                                 a plain engine does, to compare with */
};

enum {
  ATSC_WEIGHTS_MAP = 0, /* memory-mapped: pages come from the file when they are needed */
  ATSC_WEIGHTS_READ = 1 /* read into memory, each unit compared with its checksum */
};

typedef struct atsc_plan_options {
  size_t struct_size;
  const char* weights_path; /* weights.bin of the plan */
  int32_t num_threads;      /* 0: one for each physical core that this process may use */
  int32_t weights_mode;     /* ATSC_WEIGHTS_* */
  int32_t verify;           /* not 0: compare checksums of mapped weights too */
  int32_t max_sessions;     /* sessions that may exist at once; 0: one */
  const char* isa;          /* kernels of this level at most (see plan_info); NULL: the best */

  /* Of plans that were compiled for a GPU; others ignore them. */
  uint64_t vram_bytes;      /* of GPU memory, all that the plan may hold; 0: as compiled */
  int32_t no_device;        /* not 0: run on the CPU alone */
  int32_t device_ordinal;   /* of several GPUs */
  int32_t strict;           /* not 0: fail where less than planned is to be had (see notice) */
  int32_t num_units;        /* entries of on_device; 0: the plan's own placement */
  const uint8_t* on_device; /* a byte for each of the plan's units: not 0 if it shall live on the GPU */
  const struct atsc_virtual_device* virtual_device; /* how the virtual device behaves; NULL: well */
  int32_t transfer;         /* ATSC_TRANSFER_*: which of the CPU's weights a round copies to the GPU */
  double drift_threshold;   /* choose again when speeds are off by more than this share; 0: 0.15 */
  double reschedule_interval; /* but not sooner than after so many recent rounds; 0: 5 */
  int32_t rounds;           /* ATSC_ROUNDS_*: how a round runs on the GPU */
  int32_t yield_gpu;        /* not 0: while it waits for the CPU, other programs may always have it; 0:
                               where one keeps it for long, it spins if that makes rounds shorter */
} atsc_plan_options;

/* The device of plans compiled with --target virtual: host memory that plays a GPU, for tests. */
typedef struct atsc_virtual_device {
  size_t struct_size;
  uint64_t occupied_bytes;  /* of its memory, by others */
  uint64_t context_bytes;   /* by its driver */
  int32_t limits_pinning;   /* not 0: the system pins at most pinnable_bytes */
  uint64_t pinnable_bytes;
  int32_t no_graphs;        /* not 0: rounds are launches */
  double link_bytes_per_s;  /* each direction; 0: as fast as memory */
} atsc_virtual_device;

typedef struct atsc_plan_info {
  size_t struct_size;
  const char* model_name; /* strings and arrays live as long as the plan */
  const char* plan_id;
  int32_t vocab_size;
  int32_t context_length; /* most tokens of a session */
  int32_t chunk;          /* tokens of a prefill round */
  int32_t max_logit_rows; /* rows of logits of a round */
  int32_t bos_token_id;   /* -1: the model has none */
  int32_t num_eos_token_ids;
  const int32_t* eos_token_ids;
  int32_t num_threads;
  int32_t max_sessions;
  const char* isa;        /* level of the kernels in use */
  uint64_t weights_bytes;
  uint64_t cache_bytes;   /* of one session at the full context */
  int32_t num_units;      /* units of the plan, that is what placement decides over */
  int32_t num_placements; /* that the plan holds, for less and for more GPU memory */
  int32_t placement;      /* which of them is in use, from 0; -1: none, everything on the CPU */
  uint64_t predicted_device_bytes; /* GPU memory that it needs, head-room included */
  uint64_t device_bytes;           /* GPU memory that the plan holds now */
  const char* device_name;         /* NULL: no device is in use */
  const char* notice;     /* one line where less than planned was to be had, and what to do; or "" */
} atsc_plan_info;

/* Time of one unit's nodes, with cold weights. */
typedef struct atsc_unit_profile {
  size_t struct_size;
  int32_t unit;        /* index of the plan's unit */
  int32_t on_device;   /* not 0: there; 0: on the CPU */
  int64_t rows;        /* tokens of the round */
  int64_t position;    /* tokens before it */
  int64_t ns;          /* found: the median of several runs */
} atsc_unit_profile;

/* The way between CPU and GPU, as rounds use it; all found. */
typedef struct atsc_link_profile {
  size_t struct_size;
  double to_device_bytes_per_s; /* from pinned memory */
  double to_host_bytes_per_s;
  double hand_off_to_device_ns; /* latency of activations that cross while weights are copied */
  double hand_off_to_host_ns;
  double to_device_beside_cpu_bytes_per_s; /* while the CPU computes */
  double cpu_slowdown;          /* its time beside such copies to its time alone */
  uint64_t fixed_device_bytes;  /* what the plan holds of the GPU whatever lives there */
} atsc_link_profile;

enum { ATSC_LOGITS_LAST = 0, ATSC_LOGITS_NONE = 1, ATSC_LOGITS_ALL = 2, ATSC_LOGITS_ROWS = 3 };

typedef struct atsc_prefill {
  size_t struct_size;
  const int32_t* tokens;
  int64_t num_tokens;    /* at least 1 */
  int32_t batch;         /* 1; 0 means 1. Anything else is refused for now */
  int32_t logits;        /* ATSC_LOGITS_* */
  const int64_t* rows;   /* ATSC_LOGITS_ROWS: ascending indices into `tokens` */
  int64_t num_rows;
  float* out;            /* [rows of logits][vocab_size], or NULL: see session_logits */
  int64_t out_floats;    /* room at `out` */
} atsc_prefill;

typedef struct atsc_sampling {
  size_t struct_size;
  float temperature;     /* 0: the most likely token; divides the logits before all else */
  int32_t top_k;         /* 0: no limit */
  float top_p;           /* 0 or 1: no limit; else the fewest tokens of at least this probability */
  float min_p;           /* drop tokens less likely than this times the most likely one */
  int32_t ignore_eos;    /* not 0: the model's end-of-text tokens do not stop */
  int32_t has_seed;      /* 0: an unpredictable seed */
  uint64_t seed;         /* the same seed, plan and machine give the same tokens */
  const int32_t* stop_token_ids; /* besides the model's end-of-text tokens; copied */
  int32_t num_stop_token_ids;
} atsc_sampling;

enum {
  ATSC_FINISH_NONE = 0,
  ATSC_FINISH_STOP = 1,   /* `token` is a stop token */
  ATSC_FINISH_CONTEXT = 2 /* `token` is the last one: the context is full */
};

typedef struct atsc_next {
  size_t struct_size;
  int32_t token;
  int32_t finish; /* ATSC_FINISH_* */
} atsc_next;

/* What a round did and when; on a clock that all rounds share and that starts anywhere. */
enum {
  ATSC_TRACK_CPU = 0,         /* segment `index` of the CPU; without a GPU, step `index` of it */
  ATSC_TRACK_CPU_WAIT = 1,    /* before it, for the GPU */
  ATSC_TRACK_DEVICE = 2,      /* run `index` of the GPU */
  ATSC_TRACK_DEVICE_WAIT = 3, /* for the weights of unit `index` */
  ATSC_TRACK_COPY = 4         /* of unit `index` to the GPU */
};

typedef struct atsc_event {
  int32_t track; /* ATSC_TRACK_* */
  int32_t index;
  int64_t begin_ns;
  int64_t end_ns;
  const char* first_node; /* that it ran; NULL for waits and copies. Lives as long as the plan */
  const char* last_node;
} atsc_event;

typedef struct atsc_round {
  size_t struct_size;
  int64_t position;   /* tokens before it */
  int64_t num_tokens; /* of it; 0: no round */
  int64_t num_logit_rows;
  int64_t begin_ns;
  int64_t end_ns;
  int64_t num_events; /* all of them between its begin and its end */
  const atsc_event* events;
} atsc_round;

enum { ATSC_ROUND_DECODE = 0, ATSC_ROUND_PREFILL = 1 };
#define ATSC_REASON_BYTES 128

/* A new choice of the units that rounds run on the other side than where they live: copied to the GPU
 * (promoted), or on the CPU where the GPU comes back late (retreated). */
typedef struct atsc_change {
  size_t struct_size;
  int64_t when_ns;         /* on the clock of events; 0: no change */
  int32_t kind;            /* ATSC_ROUND_*: of rounds with few tokens, or with many */
  int32_t num_promoted;    /* units */
  uint64_t promoted_bytes; /* that each round copies */
  int64_t before_ns;       /* a round with the choice before, as predicted, or as trials have measured */
  int64_t after_ns;        /* with this one */
  int64_t adoption_ns;     /* that the swap took of the rounds' thread */
  int64_t build_ns;        /* beside rounds: choosing, and making the round ready */
  char reason[ATSC_REASON_BYTES];
  int32_t num_retreated;   /* units that live on the GPU and that the CPU computes in these rounds */
  uint64_t host_bytes;     /* of the CPU's memory that their weights took for the first time */
} atsc_change;

/* A tensor that goes into a general graph or comes out of it. */
enum { ATSC_MAX_RANK = 8 };

typedef struct atsc_tensor {
  size_t struct_size;
  const char* name;
  int32_t type;  /* of its elements: TensorProto.DataType of ONNX (1 float, 7 int64, 9 bool, ...) */
  int32_t rank;
  int64_t shape[ATSC_MAX_RANK];
  void* data;    /* row-major; not written to where it is an input */
  uint64_t bytes; /* at `data` */
} atsc_tensor;

typedef struct atsc_graph_info {
  size_t struct_size;
  int32_t num_inputs;
  int32_t num_outputs;
  const char* const* input_names; /* live as long as the plan */
  const char* const* output_names;
} atsc_graph_info;

typedef struct atsc_api {
  size_t struct_size;
  uint32_t version;

  /* Open the plan that this library belongs to. Any thread. */
  atsc_status (*plan_open)(const atsc_plan_options* options, atsc_plan** plan,
                           atsc_message* message);
  /* Close it; refused while sessions exist. The handle is dead after ATSC_OK. NULL is allowed. */
  atsc_status (*plan_close)(atsc_plan* plan, atsc_message* message);
  /* Any thread. */
  atsc_status (*plan_get_info)(const atsc_plan* plan, atsc_plan_info* info, atsc_message* message);

  /* An empty session. Memory for its caches is taken as they fill. Any thread. */
  atsc_status (*session_create)(atsc_plan* plan, atsc_session** session, atsc_message* message);
  /* Refused while another thread is in a call of the session. NULL is allowed. */
  atsc_status (*session_destroy)(atsc_session* session, atsc_message* message);
  /* Tokens that the session holds. */
  atsc_status (*session_get_position)(atsc_session* session, int64_t* position,
                                      atsc_message* message);

  /* Append tokens, in rounds of at most `chunk` tokens and `max_logit_rows` rows of logits. */
  atsc_status (*session_prefill)(atsc_session* session, const atsc_prefill* prefill,
                                 atsc_message* message);
  /* Append one token; its logits [vocab_size] go to `out` unless that is NULL. */
  atsc_status (*session_decode)(atsc_session* session, int32_t token, float* out,
                                atsc_message* message);
  /* The rows of logits of the latest round, borrowed until the session's next call: *rows of
   * vocab_size floats; 0 rows if that round had none. */
  atsc_status (*session_logits)(atsc_session* session, const float** logits, int64_t* rows,
                                atsc_message* message);

  /* How session_next chooses; starts anew from the seed. Without it: temperature 0. */
  atsc_status (*session_set_sampling)(atsc_session* session, const atsc_sampling* sampling,
                                      atsc_message* message);
  /* The next token, chosen from the latest logits. A token is appended only when the one after it
   * is asked for, so that no time goes into a token that nobody wants: the last one returned is not
   * part of the session yet. Prefill, decode and rewind drop it. */
  atsc_status (*session_next)(atsc_session* session, atsc_next* next, atsc_message* message);

  /* Keep the first `position` tokens. Layers with an attention window forget older tokens: going
   * further back than they remember is ATSC_INVALID_ARGUMENT, and says to prefill again. */
  atsc_status (*session_rewind)(atsc_session* session, int64_t position, atsc_message* message);
  /* End the present call at the next node with ATSC_CANCELLED, or, if there is none, the next call
   * that runs a round; a rewind takes the wish back. Any thread. */
  atsc_status (*session_cancel)(atsc_session* session, atsc_message* message);

  /* Write the session's state to a file, which appears whole or not at all. */
  atsc_status (*session_save)(atsc_session* session, const char* path, atsc_message* message);
  /* Replace the session's state by a saved one of the same plan. */
  atsc_status (*session_restore)(atsc_session* session, const char* path, atsc_message* message);

  /* Measure this machine with the plan's own kernels, while no round runs; for the compiler. */
  atsc_status (*plan_profile_unit)(atsc_plan* plan, atsc_unit_profile* profile,
                                   atsc_message* message);
  atsc_status (*plan_profile_link)(atsc_plan* plan, atsc_link_profile* profile,
                                   atsc_message* message);

  /* Change how the virtual device behaves, also while rounds run: `what` is "link" (bytes/s each
   * way), "slowdown" (factor of all kernels), "kernel NAME" (least ns of kernels whose names begin
   * so), "cpu" (factor of what the CPU computes beside it), "wake" (ns that it takes to come back from
   * a wait for the CPU or for a copy; 0.6 of them from one that spins) or "fault NAME" (the next such launch fails). Any thread. */
  atsc_status (*plan_script_device)(atsc_plan* plan, const char* what, double value,
                                    atsc_message* message);

  /* Events of the latest whole round that a GPU took part in: the first `room` of them go to `events`,
   * *count says how many there are. Any thread; waits for a round that runs. */
  atsc_status (*plan_get_events)(atsc_plan* plan, atsc_event* events, int64_t room, int64_t* count,
                                 atsc_message* message);

  /* Keep a record of every whole round of the session from now on (not 0), or drop all records and
   * keep none (0), which is how a session begins. They take memory until they are taken. */
  atsc_status (*session_set_recording)(atsc_session* session, int32_t on, atsc_message* message);
  /* The oldest record that was not taken yet; its events are borrowed until the session's next call. */
  atsc_status (*session_take_round)(atsc_session* session, atsc_round* round,
                                    atsc_message* message);

  /* The oldest change of promotions that was not taken yet; the plan keeps the latest thousand. The
   * first choice of a kind is one, too. Any thread. */
  atsc_status (*plan_take_change)(atsc_plan* plan, atsc_change* change, atsc_message* message);

  /* Plans of general graphs (encoders, classifiers): no language models, so they have no sessions, and
   * these are refused by all others. Any thread; runs of one plan come one after the other. */
  atsc_status (*plan_get_graph)(const atsc_plan* plan, atsc_graph_info* info, atsc_message* message);
  /* Run the model on all its inputs, in any order; the outputs listed get their type, rank and shape,
   * and their content at `data`. Where one has no `data` (NULL), nothing is computed: the call says
   * how large all of them will be. The first struct_size of each array holds for the whole array. */
  atsc_status (*plan_run)(atsc_plan* plan, const atsc_tensor* inputs, int32_t num_inputs,
                          atsc_tensor* outputs, int32_t num_outputs, atsc_message* message);
} atsc_api;

/* The table for callers built for a version, or NULL if this library does not serve them. */
typedef const atsc_api* (*atsc_get_api_function)(uint32_t version);

#ifdef __cplusplus
}
#endif
#endif
