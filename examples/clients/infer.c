/* Ask a model with libmosquitto, and print its answer as JSON:
 *
 *   cc -o infer infer.c -lmosquitto            (Debian: libmosquitto-dev)
 *   ./infer broker 1883 kitchen faces cat.jpg
 *
 * Needs MQTT 5. The request is repeated with the same Correlation Data every two seconds until the answer is
 * there or 30 s have passed: the agent recognises it, and does not compute it again.
 */
#include <mosquitto.h>
#include <mqtt_protocol.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

enum { DEADLINE_S = 30, RESEND_S = 2, TOPIC_BYTES = 512 };

static bool subscribed, answered;
static char status[16];

static void on_subscribe(struct mosquitto *client, void *data, int id, int count, const int *granted) {
  (void)client, (void)data, (void)id;
  subscribed = count == 1 && granted[0] < 0x80;
}

static void on_message(struct mosquitto *client, void *data, const struct mosquitto_message *message,
                       const mosquitto_property *properties) {
  (void)client, (void)data;
  char *name, *value;
  const mosquitto_property *next =
      mosquitto_property_read_string_pair(properties, MQTT_PROP_USER_PROPERTY, &name, &value, false);
  while (next != NULL) {
    if (strcmp(name, "__stat") == 0) snprintf(status, sizeof status, "%s", value);
    free(name), free(value);
    next = mosquitto_property_read_string_pair(next, MQTT_PROP_USER_PROPERTY, &name, &value, true);
  }
  if (!answered) printf("%.*s\n", message->payloadlen, (const char *)message->payload);
  answered = true;
}

/* Run the connection for a moment. Without TCP_QUICKACK, which the kernel forgets, the broker waits 40 ms. */
static int turn(struct mosquitto *client) {
  const int one = 1;
  int result = mosquitto_loop(client, 100, 1);
  setsockopt(mosquitto_socket(client), IPPROTO_TCP, TCP_QUICKACK, &one, sizeof one);
  return result;
}

static char *read_file(const char *path, long *bytes) {
  FILE *file = fopen(path, "rb");
  if (file == NULL) return NULL;
  fseek(file, 0, SEEK_END);
  *bytes = ftell(file);
  rewind(file);
  char *content = *bytes > 0 ? malloc((size_t)*bytes) : NULL;
  if (content != NULL && fread(content, 1, (size_t)*bytes, file) != (size_t)*bytes) {
    free(content);
    content = NULL;
  }
  fclose(file);
  return content;
}

int main(int count, char **arguments) {
  if (count != 6 && count != 7) {
    fprintf(stderr, "usage: %s BROKER PORT AGENT MODEL PICTURE [USER]\n", arguments[0]);
    return 2;
  }
  const char *user = count == 7 ? arguments[6] : NULL;
  const char *host = arguments[1], *agent = arguments[3], *model = arguments[4], *path = arguments[5];
  long bytes = 0;
  char *picture = read_file(path, &bytes);
  unsigned char noise[8];
  FILE *random = fopen("/dev/urandom", "rb");
  if (picture == NULL || random == NULL || fread(noise, 1, sizeof noise, random) != sizeof noise) {
    fprintf(stderr, "error: cannot read %s\n", path);
    return 4;
  }
  fclose(random);
  char id[17], topic[TOPIC_BYTES], reply_to[TOPIC_BYTES];
  for (int i = 0; i < 8; i++) snprintf(id + 2 * i, 3, "%02x", noise[i]);
  /* The user name at the broker ends the topic of the request, and is the first level below replies/; the next one
   * is whom you ask. */
  snprintf(topic, sizeof topic, "edge/v1/%s/models/%s/infer%s%s", agent, model, user ? "/" : "", user ? user : "");
  snprintf(reply_to, sizeof reply_to, "edge/v1/replies/%s/%s/%s", user ? user : "anonymous", agent, id);

  mosquitto_lib_init();
  struct mosquitto *client = mosquitto_new(NULL, true, NULL);
  mosquitto_int_option(client, MOSQ_OPT_PROTOCOL_VERSION, MQTT_PROTOCOL_V5);
  mosquitto_int_option(client, MOSQ_OPT_TCP_NODELAY, 1);
  mosquitto_subscribe_callback_set(client, on_subscribe);
  mosquitto_message_v5_callback_set(client, on_message);
  mosquitto_username_pw_set(client, user, user ? getenv("MQTT_PASSWORD") : NULL);
  if (getenv("MQTT_CAFILE")) mosquitto_tls_set(client, getenv("MQTT_CAFILE"), NULL, NULL, NULL, NULL);
  int result = mosquitto_connect(client, host, atoi(arguments[2]), 30);
  if (result == MOSQ_ERR_SUCCESS) result = mosquitto_subscribe(client, NULL, reply_to, 1);

  mosquitto_property *properties = NULL;
  bool is_png = bytes > 4 && memcmp(picture, "\x89PNG", 4) == 0;
  mosquitto_property_add_string(&properties, MQTT_PROP_RESPONSE_TOPIC, reply_to);
  mosquitto_property_add_binary(&properties, MQTT_PROP_CORRELATION_DATA, id, 16);
  mosquitto_property_add_string(&properties, MQTT_PROP_CONTENT_TYPE, is_png ? "image/png" : "image/jpeg");
  mosquitto_property_add_int32(&properties, MQTT_PROP_MESSAGE_EXPIRY_INTERVAL, DEADLINE_S);

  time_t began = time(NULL), sent = 0;
  while (result == MOSQ_ERR_SUCCESS && !answered && time(NULL) - began < DEADLINE_S) {
    if (subscribed && time(NULL) - sent >= RESEND_S) {
      sent = time(NULL);
      result = mosquitto_publish_v5(client, NULL, topic, (int)bytes, picture, 1, false, properties);
    }
    if (result == MOSQ_ERR_SUCCESS) result = turn(client);
  }
  if (result != MOSQ_ERR_SUCCESS) fprintf(stderr, "error: %s\n", mosquitto_strerror(result));
  else if (!answered) fprintf(stderr, "error: no answer from %s within %d s\n", agent, DEADLINE_S);
  mosquitto_disconnect(client);
  mosquitto_property_free_all(&properties);
  mosquitto_destroy(client);
  mosquitto_lib_cleanup();
  free(picture);
  return answered && strcmp(status, "200") == 0 ? 0 : 4;
}
