#!/usr/bin/env bash
# Regenerates tests/fixtures/grafana/schema.json: the JSON schema of a dashboard and of the panels that we use, made from the
# types that Grafana publishes on npm (@grafana/schema, Apache-2.0). Needs node and npm. VERSION is compose's Grafana.
set -euo pipefail
VERSION=${VERSION:-11.6.1}
ROOT=$(cd "$(dirname "$0")/.." && pwd)
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
cd "$WORK"
npm init -y >/dev/null
npm install --silent --no-audit --no-fund --ignore-scripts "@grafana/schema@$VERSION" ts-json-schema-generator@2.4.0 typescript
echo '{"compilerOptions":{"skipLibCheck":true,"moduleResolution":"node","target":"es2020","module":"esnext"},"files":["one.ts"]}' > tsconfig.json
RAW=@grafana/schema/dist/esm/raw

one() { # our name, the file, the type
  echo "import type { $3 as T } from \"$RAW/$2\"; export interface Root { value: T }" > one.ts
  npx --no-install ts-json-schema-generator --path one.ts --type Root --tsconfig tsconfig.json --no-type-check -o "schema-$1.json"
}

one dashboard dashboard/x/dashboard_types.gen Dashboard
for panel in timeseries:TimeSeries stat:Stat table:Table text:Text; do
  one "${panel%%:*}.options" "composable/${panel%%:*}/panelcfg/x/${panel##*:}PanelCfg_types.gen" Options
done
for panel in timeseries:TimeSeries table:Table; do
  one "${panel%%:*}.custom" "composable/${panel%%:*}/panelcfg/x/${panel##*:}PanelCfg_types.gen" FieldConfig
done
python3 - "$VERSION" "$ROOT/tests/fixtures/grafana/schema.json" <<'PYTHON'
import json, pathlib, sys

def bare(node):
    """Return a schema without the sentences that explain it."""
    if isinstance(node, dict):
        return {k: bare(v) for k, v in node.items() if not (k == "description" and isinstance(v, str))}
    return [bare(v) for v in node] if isinstance(node, list) else node

found = {p.stem.removeprefix("schema-"): bare(json.loads(p.read_text())) for p in sorted(pathlib.Path().glob("schema-*.json"))}
source = f"made by scripts/grafana-schema.sh from npm's @grafana/schema {sys.argv[1]} (Grafana Labs, Apache-2.0)"
out = pathlib.Path(sys.argv[2])
out.parent.mkdir(parents=True, exist_ok=True)
out.write_text(json.dumps({"source": source, "schemas": found}, indent=1, sort_keys=True) + "\n")
print(out, len(found), "schemas")
PYTHON
