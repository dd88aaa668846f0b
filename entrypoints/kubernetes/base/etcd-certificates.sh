#!/bin/sh
# Make a CA, and a certificate for the three members of etcd.yaml, in a directory: ca.crt, ca.key, server.crt, server.key.
# etcd-certificates.sh DIRECTORY [NAMESPACE]
set -eu
directory=${1:?expected a directory} namespace=${2:-elastic-ext}
umask 077
mkdir -p "$directory"
cd "$directory"
days=3650
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days $days -subj "/CN=etcd CA of $namespace" \
  -keyout ca.key -out ca.crt
openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=etcd" -keyout server.key -out server.csr
service=etcd.$namespace.svc # part of the members' names, and alone for clients that take one address
cat > server.ext <<END
subjectAltName=DNS:localhost,IP:127.0.0.1,DNS:$service,DNS:*.$service,DNS:$service.cluster.local,DNS:*.$service.cluster.local
extendedKeyUsage=serverAuth,clientAuth
END
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days $days -extfile server.ext -out server.crt
rm server.csr server.ext
