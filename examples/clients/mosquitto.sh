#!/bin/sh
# Ask a model about a picture with mosquitto_pub and mosquitto_sub (Debian: mosquitto-clients), and print the
# answer as JSON:
#
#   examples/clients/mosquitto.sh kitchen faces cat.jpg -h broker
#   EDGEBUNDLE_USER=alice examples/clients/mosquitto.sh kitchen faces cat.jpg -h broker -u alice -P secret --cafile ca.pem
#
# Needs MQTT 5. mosquitto_rr does the same with one command, but that of Debian 12 sends an empty file. A request
# is sent once: repeat it with the same Correlation Data if it must not be lost (docs/mqtt.md, "Delivery").
set -eu
[ $# -ge 3 ] || { echo "usage: $0 AGENT MODEL PICTURE [OPTION OF mosquitto_pub ...]" >&2; exit 2; }
agent=$1 model=$2 picture=$3
shift 3

case $picture in
  *.png) type=image/png ;;
  *) type=image/jpeg ;;
esac
# The user name at the broker is the last level of the request's topic, and the first of the answer's; the rest of that
# is random, so that others cannot guess it.
id=$(od -An -N8 -tx1 /dev/urandom | tr -d ' \n')
reply=edge/v1/replies/${EDGEBUNDLE_USER:-anonymous}/$agent/$id

# Subscribe and leave: the broker keeps the session for a minute, and the answer in it.
mosquitto_sub -V 5 "$@" -q 1 -t "$reply" -i "edgebundle-$id" -c -x 60 -E
mosquitto_pub -V 5 "$@" -q 1 -t "edge/v1/$agent/models/$model/infer${EDGEBUNDLE_USER:+/$EDGEBUNDLE_USER}" -f "$picture" \
  -D PUBLISH response-topic "$reply" -D PUBLISH correlation-data "$id" \
  -D PUBLISH content-type "$type" -D PUBLISH message-expiry-interval 30
# The session ends with this connection.
exec mosquitto_sub -V 5 "$@" -q 1 -t "$reply" -i "edgebundle-$id" -c -x 0 -C 1 -W 30
