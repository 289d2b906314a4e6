#!/bin/sh
# Makes the test certificates in the folder $1: a CA (ca.crt) and, each as NAME.crt and NAME.key:
#   good         127.0.0.1 and localhost, signed by the CA     wrong-host   signed by the CA for another name
#   expired      as good, but of the year 2020                 self-signed  as good, signed by nobody else
#   client       a client certificate signed by the CA
# Needs openssl 1.1.1 or later. Keys are for tests alone: anybody may read them.
set -eu
dir=${1:?usage: certs.sh DIRECTORY}
mkdir -p "$dir"
cd "$dir"

cat > ca.cnf <<CONF
[ca]
default_ca = this
[this]
database = index.txt
new_certs_dir = .
rand_serial = yes
default_md = sha256
policy = any
copy_extensions = copy
unique_subject = no
[any]
commonName = supplied
[req]
distinguished_name = name
[name]
CONF
: > index.txt

key() {
    openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1.key" 2>/dev/null
    chmod 644 "$1.key"
}

# signed NAME ALTERNATIVE_NAMES START END
signed() {
    key "$1"
    openssl req -new -config ca.cnf -key "$1.key" -subj "/CN=$1" -addext "subjectAltName=$2" -out "$1.csr"
    openssl ca -batch -notext -config ca.cnf -cert ca.crt -keyfile ca.key -startdate "$3" -enddate "$4" \
        -in "$1.csr" -out "$1.crt" 2>ca.log || { cat ca.log >&2; exit 1; }
    rm "$1.csr"
}

here=IP:127.0.0.1,DNS:localhost
key ca
openssl req -x509 -new -config ca.cnf -key ca.key -subj "/CN=endpoint test CA" -days 3650 \
    -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign -out ca.crt
signed good "$here" 20200101000000Z 20450101000000Z
signed wrong-host DNS:elsewhere.invalid 20200101000000Z 20450101000000Z
signed expired "$here" 20200101000000Z 20200102000000Z
signed client "email:client@test.invalid" 20200101000000Z 20450101000000Z
key self-signed
openssl req -x509 -new -config ca.cnf -key self-signed.key -subj "/CN=self-signed" -days 3650 \
    -addext "subjectAltName=$here" -out self-signed.crt
rm -f ca.cnf ca.log index.txt* ./*.pem serial*
