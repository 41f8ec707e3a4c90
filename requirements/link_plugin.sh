#!/bin/sh
# Link an editable plugin to beside fairseq, where --user-dir fairseq_ms finds it in every folder; pip removes the link.
set -e
site=$("$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
[ -d "$site" ]
ln -sfn "$2" "$site/fairseq_ms"
for record in "$site"/fairseq_ms-*.dist-info/RECORD; do
    [ ! -f "$record" ] || echo fairseq_ms,, >>"$record"
done
