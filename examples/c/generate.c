/* Generates tokens from a plan: generate PLAN TOKEN...
 *
 *     make && ./generate model.atsplan 1 4093 198
 *
 * Prints the ids that follow the given ones, each as soon as it is chosen, and the speed. Text and ids
 * are the application's: the plan's folder tokenizer/ has the tokenizer.json that its library reads. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "atsc_open.h"

enum { MOST_TOKENS = 64 };

static double now(void) {
  struct timespec time;
  timespec_get(&time, TIME_UTC);
  return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* Token ids from the command line; NULL if one is no number. */
static int32_t* parse_tokens(char** texts, int count) {
  int32_t* tokens = malloc(sizeof *tokens * (size_t)count);
  for (int i = 0; tokens != NULL && i < count; ++i) {
    char* end = texts[i];
    errno = 0;
    const long token = strtol(texts[i], &end, 10);
    if (end == texts[i] || *end != '\0' || errno != 0 || token < 0 || token > INT32_MAX) {
      fprintf(stderr, "generate: %s is no token id\n", texts[i]);
      free(tokens);
      return NULL;
    }
    tokens[i] = (int32_t)token;
  }
  return tokens;
}

/* Prefills the prompt and prints what follows it. */
static atsc_status generate(const atsc_api* api, atsc_session* session, const int32_t* tokens,
                            int count, atsc_message* message) {
  const double start = now();
  const atsc_prefill prompt = {
      .struct_size = sizeof prompt, .tokens = tokens, .num_tokens = count};
  atsc_status status = api->session_prefill(session, &prompt, message);
  if (status != ATSC_OK) return status;

  const double prefilled = now();
  int generated = 0;
  while (generated < MOST_TOKENS) {
    atsc_next next = {.struct_size = sizeof next};
    status = api->session_next(session, &next, message);
    if (status != ATSC_OK) return status;
    if (next.finish == ATSC_FINISH_STOP) break;
    printf("%s%" PRId32, generated > 0 ? " " : "", next.token);
    fflush(stdout);
    ++generated;
    if (next.finish == ATSC_FINISH_CONTEXT) break;
  }
  printf("\n");
  fprintf(stderr, "prefill %.1f tokens/s, decode %.1f tokens/s\n", count / (prefilled - start),
          generated / (now() - prefilled));
  return ATSC_OK;
}

/* Says what is less than planned: no GPU here, or too little of its memory free. */
static atsc_status show_notice(const atsc_opened* opened, atsc_message* message) {
  atsc_plan_info info = {.struct_size = sizeof info};
  const atsc_status status = opened->api->plan_get_info(opened->plan, &info, message);
  if (status == ATSC_OK && info.notice != NULL && info.notice[0] != '\0') {
    fprintf(stderr, "generate: %s\n", info.notice);
  }
  return status;
}

int main(int argc, char** argv) {
  if (argc < 3) {
    fprintf(stderr, "usage: %s PLAN TOKEN...\n", argv[0]);
    return 2;
  }
  int32_t* tokens = parse_tokens(argv + 2, argc - 2);
  if (tokens == NULL) return 2;

  atsc_message message = {.struct_size = sizeof message};
  atsc_opened opened = {.struct_size = sizeof opened};
  atsc_session* session = NULL;
  atsc_status status = atsc_open(argv[1], NULL, &opened, &message);
  if (status == ATSC_OK) status = show_notice(&opened, &message);
  if (status == ATSC_OK) status = opened.api->session_create(opened.plan, &session, &message);
  if (status == ATSC_OK) status = generate(opened.api, session, tokens, argc - 2, &message);
  if (status != ATSC_OK) fprintf(stderr, "generate: %s\n", message.text);

  if (session != NULL) opened.api->session_destroy(session, NULL);
  atsc_close(&opened, NULL);
  free(tokens);
  return status == ATSC_OK ? 0 : 1;
}
