"""The looks of every page and drawing: light and dark, no fonts and no pictures from elsewhere."""

from collections.abc import Sequence

_LIGHT = ("#2563c9", "#dd7a12", "#1f9a6b", "#b0409a", "#6d52cf", "#c4372f", "#0a8ea3", "#85701a")
_DARK = ("#6ea8ff", "#f5a04a", "#4fcf9c", "#e383cf", "#a994ff", "#ff7f73", "#4cc7da", "#d0b95a")
COLOURS = len(_LIGHT)  # how many there are before they repeat
_FONT = 'system-ui,-apple-system,"Segoe UI",Roboto,sans-serif'


def _palette(colours: Sequence[str]) -> str:
    return ":root{" + "".join(f"--s{number}:{colour};" for number, colour in enumerate(colours, start=1)) + "}"


_COLOUR_CLASSES = "".join(f".c{number}{{--c:var(--s{number})}}" for number in range(1, COLOURS + 1))

_VARIABLES = f"""
:root{{--page:#f5f6f8;--card:#fff;--ink:#171b22;--muted:#5d6674;--rule:#e3e6eb;--alert:#b3261e;--alert-ground:#fdeceb}}
@media (prefers-color-scheme:dark){{:root{{--page:#0f1216;--card:#181c22;--ink:#e9ecf1;--muted:#9aa4b2;--rule:#2b313a;
--alert:#ff8a80;--alert-ground:#3a1c1b}}}}
{_palette(_LIGHT)}
@media (prefers-color-scheme:dark){{{_palette(_DARK)}}}
.c0{{--c:var(--muted)}}{_COLOUR_CLASSES}
"""

_MARKS = """
.chart text{font-size:12px;fill:var(--muted);font-variant-numeric:tabular-nums}
.chart .empty{font-size:14px}
.grid{stroke:var(--rule);stroke-width:1}
.axis{stroke:var(--muted);stroke-width:1;opacity:.6}
.line{fill:none;stroke:var(--c);stroke-width:2.25;stroke-linejoin:round;stroke-linecap:round}
.bridge{fill:none;stroke:var(--c);stroke-width:1.5;stroke-dasharray:1 4;stroke-linecap:round}
.level{fill:none;stroke:var(--c);stroke-width:1.75;stroke-dasharray:6 4}
.point{fill:var(--c);stroke:transparent;stroke-width:12}
.error{fill:none;stroke:var(--c);stroke-width:1}
.bar rect{fill:var(--c)}.bar:hover{opacity:.75}
.mark{stroke:var(--alert);stroke-width:1.5;stroke-dasharray:2 3}
"""

# A drawing in a file of its own has no page whose fonts and colours it could take.
DRAWING_STYLE = f"{_VARIABLES}{_MARKS}text{{font-family:{_FONT}}}"

PAGE_STYLE = (
    _VARIABLES
    + ":root{--shade:#17202c38}@media (prefers-color-scheme:dark){:root{--shade:#000c}}"
    + f"body{{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 {_FONT}}}"
    + """
*{box-sizing:border-box}
main{max-width:1120px;margin:0 auto;padding:2.5rem 1.25rem 3rem;display:grid;gap:1.25rem;
grid-template-columns:minmax(0,1fr)}
h1,h2,h3,p,dl,figure{margin:0}
h1{font-size:clamp(1.6rem,4vw,2.4rem);line-height:1.15;letter-spacing:-.02em;overflow-wrap:anywhere}
h2{font-size:1.05rem;line-height:1.3}h3{font-size:1rem;margin-top:1rem;overflow-wrap:anywhere}
.kind{color:var(--muted);margin-bottom:.35rem}
.headline{font-size:clamp(1.05rem,2.2vw,1.3rem);margin-top:.75rem;max-width:52em;line-height:1.4;overflow-wrap:anywhere}
.unbroken{white-space:nowrap}
.badge{display:inline-block;font-size:.75rem;font-weight:600;line-height:1.3;padding:.1em .6em;border-radius:1em;
border:1px solid currentColor;color:var(--muted);white-space:nowrap;vertical-align:.1em}
.badge.alert{color:var(--alert);background:var(--alert-ground)}
.warning{padding:.75rem 1rem;margin-bottom:.9rem;border-radius:10px;color:var(--alert);background:var(--alert-ground)}
.live{position:sticky;top:0;z-index:1;display:flex;flex-wrap:wrap;gap:.1rem 1rem;padding:.5rem 1.25rem;font-size:.9rem;
background:var(--card);border-bottom:1px solid var(--rule)}
.live [role=status]::before{content:"";display:inline-block;width:.6em;height:.6em;border-radius:50%;margin-right:.5em;
background:var(--muted)}
.live.running [role=status]::before{background:var(--s3);animation:pulse 2s ease-in-out infinite}
.live.damaged [role=status]::before{background:var(--alert)}
@keyframes pulse{50%{opacity:.25}}@media (prefers-reduced-motion:reduce){.live [role=status]::before{animation:none}}
.live .age{color:var(--muted)}.live .lost{color:var(--alert)}
.card,.tile,figure{background:var(--card);border:1px solid var(--rule);border-radius:14px;padding:1.1rem 1.25rem}
.card>h2{margin-bottom:.6rem}.card .card{margin-top:.75rem}
.card>p,.tile p,figcaption p,footer{color:var(--muted);font-size:.9rem}.card>p.warning{color:var(--alert)}
.card>p{margin-top:.5rem}
.tiles{display:grid;gap:1rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,19rem),1fr))}
.tile h2{font-size:.9rem;font-weight:500;color:var(--muted)}
.tile .figure{font-size:1.9rem;font-weight:650;color:var(--ink);letter-spacing:-.02em;line-height:1.25}
.meter{height:6px;border-radius:3px;background:var(--rule);margin:.35rem 0 .5rem;overflow:hidden}
.meter i{display:block;height:100%;background:var(--s1);border-radius:3px}
.charts{display:grid;gap:1rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr))}
figure{min-width:0}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.35rem 1.25rem}
dt{color:var(--muted)}dd{margin:0;overflow-wrap:anywhere}
.scroll{overflow-x:auto;background:linear-gradient(90deg,var(--card) 35%,transparent) 0 0/3rem 100% no-repeat local,
linear-gradient(270deg,var(--card) 35%,transparent) 100% 0/3rem 100% no-repeat local,
linear-gradient(90deg,var(--shade),transparent) 0 0/.7rem 100% no-repeat scroll,
linear-gradient(270deg,var(--shade),transparent) 100% 0/.7rem 100% no-repeat scroll}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.4rem .8rem .4rem 0;border-bottom:1px solid var(--rule);vertical-align:top}
th{color:var(--muted);font-weight:500;white-space:nowrap}
td{overflow-wrap:break-word;min-width:4rem;max-width:34rem}td:first-child{min-width:5.5rem}
tbody tr:last-child td{border-bottom:0}
.number{text-align:right;min-width:0;white-space:nowrap}td.number{overflow-wrap:normal}
.swatch td:first-child{min-width:7rem;font-weight:600;border-left:4px solid var(--c);padding-left:.6rem}
summary{cursor:pointer;font-weight:600;overflow-wrap:anywhere}details[open]>summary{margin-bottom:.6rem}
@media (max-width:560px){main{padding:1.5rem .8rem 2rem;gap:.9rem}.tiles{grid-template-columns:1fr 1fr;gap:.7rem}
.tile,.card,figure{padding:.85rem .9rem}.tile .figure{font-size:1.45rem}
dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:.6rem}
td{min-width:8rem}td:first-child{min-width:5rem}td.number{min-width:0}th,td{padding-right:.6rem}}
"""
    + _MARKS
    + """
.chart{display:block;width:100%;height:auto;overflow:visible;margin-top:.5rem}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;margin:.6rem 0 0;padding:0;font-size:.85rem}
.legend li{overflow-wrap:anywhere}
.legend li::before{content:"";display:inline-block;width:.75em;height:.75em;border-radius:3px;background:var(--c);
margin-right:.45em}
.legend .dashed::before{height:0;width:1.3em;border-radius:0;background:none;border-top:2px dashed var(--c);
vertical-align:.25em}
.legend .marked::before{width:0;border-radius:0;background:none;border-left:2px dotted var(--alert);margin-left:.35em}
@media (max-width:560px){.chart text{font-size:16.5px}}
"""
)
